"""Kernels of batched NMS: one computes all overlaps as bits, the other goes through each list once."""

import triton
import triton.language as tl


@triton.jit
def load_box(p_boxes, o, m):
    """Load the four coordinates of boxes."""
    p = p_boxes + o.to(tl.int64) * 4
    x0, y0 = tl.load(p, mask=m, other=0.0), tl.load(p + 1, mask=m, other=0.0)
    x1, y1 = tl.load(p + 2, mask=m, other=0.0), tl.load(p + 3, mask=m, other=0.0)
    return x0, y0, x1, y1


@triton.jit(do_not_specialize=["count", "words"])
def overlap_bits(p_boxes, p_bits, count, words, overlap, BLOCK: tl.constexpr):
    """Store one word per box and 32 candidates: which later boxes of its list of `count` overlap it too much."""
    start = tl.program_id(0) * count
    word = tl.program_id(2)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bit = tl.arange(0, 32)
    j = word * 32 + bit
    a0, b0, a1, b1 = load_box(p_boxes, start + i, i < count)
    c0, d0, c1, d1 = load_box(p_boxes, start + j, j < count)
    wide = tl.minimum(a1[:, None], c1[None, :]) - tl.maximum(a0[:, None], c0[None, :])
    high = tl.minimum(b1[:, None], d1[None, :]) - tl.maximum(b0[:, None], d0[None, :])
    both = tl.maximum(wide, 0.0) * tl.maximum(high, 0.0)
    either = ((a1 - a0) * (b1 - b0))[:, None] + ((c1 - c0) * (d1 - d0))[None, :] - both
    too_much = (both > overlap * either) & (j[None, :] > i[:, None]) & (j < count)[None, :]
    # Each bit occurs once, so the sum is the bitwise or.
    found = tl.sum(too_much.to(tl.int32) << bit[None, :], 1)
    tl.store(p_bits + (start + i).to(tl.int64) * words + word, found, mask=i < count)


@triton.jit(do_not_specialize=["count", "words"])
def walk(p_bits, p_gone, count, words, BLOCK: tl.constexpr):
    """Go through a list, best box first; each kept box removes those that it overlaps. `gone`: a bit per box."""
    row = tl.program_id(0).to(tl.int64)
    o_w = tl.arange(0, BLOCK)
    m = o_w < words
    p = p_bits + row * count * words + o_w
    gone = tl.load(p_gone + row * words + o_w, mask=m, other=0)
    after = tl.load(p, mask=m, other=0)
    for i in range(count):
        bits = after
        p += words
        # Prefetch the next row while this one is used; the buffer has one row more than boxes.
        after = tl.load(p, mask=m, other=0)
        mine = tl.sum(tl.where(o_w == i // 32, gone, 0), 0) >> (i % 32)
        gone = tl.where((mine & 1) == 0, gone | bits, gone)
    tl.store(p_gone + row * words + o_w, gone, mask=m)
