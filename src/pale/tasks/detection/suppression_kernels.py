"""Suppression of overlapping boxes in many lists at once: who overlaps whom in bits, then one walk down each list."""

import triton
import triton.language as tl


@triton.jit
def load_box(p_boxes, o, m):
    """The four edges of boxes."""
    p = p_boxes + o.to(tl.int64) * 4
    x0, y0 = tl.load(p, mask=m, other=0.0), tl.load(p + 1, mask=m, other=0.0)
    x1, y1 = tl.load(p + 2, mask=m, other=0.0), tl.load(p + 3, mask=m, other=0.0)
    return x0, y0, x1, y1


@triton.jit(do_not_specialize=["count", "words"])
def overlap_bits(p_boxes, p_bits, count, words, overlap, BLOCK: tl.constexpr):
    """For each box of a list (`count` each) a word: which of 32 boxes after it overlap too much with it."""
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
    # Each bit once, so their sum is all of them.
    found = tl.sum(too_much.to(tl.int32) << bit[None, :], 1)
    tl.store(p_bits + (start + i).to(tl.int64) * words + word, found, mask=i < count)


@triton.jit(do_not_specialize=["count", "words"])
def walk(p_bits, p_gone, count, words, BLOCK: tl.constexpr):
    """From the best box of a list on: who is not gone lets those that overlap go. `gone` holds a bit a box."""
    row = tl.program_id(0).to(tl.int64)
    o_w = tl.arange(0, BLOCK)
    m = o_w < words
    p = p_bits + row * count * words + o_w
    gone = tl.load(p_gone + row * words + o_w, mask=m, other=0)
    after = tl.load(p, mask=m, other=0)
    for i in range(count):
        bits = after
        p += words
        # The next ones are under way while these are looked at; after the last there is room for some.
        after = tl.load(p, mask=m, other=0)
        mine = tl.sum(tl.where(o_w == i // 32, gone, 0), 0) >> (i % 32)
        gone = tl.where((mine & 1) == 0, gone | bits, gone)
    tl.store(p_gone + row * words + o_w, gone, mask=m)
