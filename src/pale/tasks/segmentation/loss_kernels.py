"""Cross-entropy of logits after bilinear upsampling, without storing the upsampled logits.

A program processes one cell of the small map, or a few neighbouring ones: the output pixels between a position, its
right neighbour and the two below. Their logits are interpolated from these four corners in the forward and again in
the backward pass. In the backward pass each cell stores the gradient of its four corners, and a second kernel adds the
four cells around each position. Maps are (b, h, w, n) in any 16 or 32 bit type, pixels (b, rows, columns); nothing is
specialised on a size.
"""

import triton
import triton.language as tl


@triton.jit
def within(place, before, after):
    """Return the coordinates of output pixels in the small map."""
    at = (place + 0.5) * (before.to(tl.float32) / after) - 0.5
    return tl.minimum(tl.maximum(at, 0.0), before - 1.0)


@triton.jit
def first_of(cell, before, after):
    """Return the first output pixel at or after a row or column of the small map."""
    guess = tl.ceil((cell + 0.5) * (after.to(tl.float32) / before) - 0.5).to(tl.int32)
    guess = tl.minimum(tl.maximum(guess, 0), after)
    # Rounding may be off by one: `within` decides.
    guess = tl.where((guess > 0) & (within(guess - 1, before, after) >= cell), guess - 1, guess)
    guess = tl.where((guess < after) & (within(guess, before, after) < cell), guess + 1, guess)
    return tl.where(cell <= 0, 0, tl.where(cell >= before, after, guess))


@triton.jit
def corner(p_logits, row, column, w, o_c, m, N: tl.constexpr):
    """Load the logits at positions of a row of the small map, (cells, BLOCK_N)."""
    p = p_logits + (row * w + column).to(tl.int64)[:, None] * N + o_c[None, :]
    return tl.load(p, mask=m, other=0.0)


@triton.jit
def between(b_near, b_far, part):
    """Interpolate linearly."""
    b_near = b_near.to(tl.float32)
    return b_near + part * (b_far.to(tl.float32) - b_near)


@triton.jit
def load_labels(
    p_labels, p_weights, o, m, N: tl.constexpr, IGNORED: tl.constexpr, WEIGHTED: tl.constexpr
):
    """Return the classes of pixels and their weights: 0 where ignored, NaN for an invalid class."""
    label = tl.load(p_labels + o, mask=m, other=IGNORED).to(tl.int32)
    counted = (label >= 0) & (label < N) & (label != IGNORED)
    if WEIGHTED:  # noqa: SIM108
        weight = tl.load(p_weights + label, mask=counted, other=0.0)
    else:
        weight = counted.to(tl.float32)
    return label, tl.where(counted | (label == IGNORED), weight, float("nan"))


@triton.jit
def cell(
    p_logits, line, block, h, w, columns,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr,
):  # fmt: skip
    """Return the data of a program: classes, cells, mask, the logits at the corners, and the columns of its pixels.

    The columns are the first in each cell, the last plus one, and the largest number of them.
    """
    o_c, j = tl.arange(0, BLOCK_N), block * BLOCK_J + tl.arange(0, BLOCK_J)
    m = (j < w)[:, None] & (o_c < N)[None, :]
    below, right = line + (line % h + 1 < h).to(tl.int32), tl.minimum(j + 1, w - 1)
    b_00 = corner(p_logits, line, j, w, o_c, m, N)
    b_01 = corner(p_logits, line, right, w, o_c, m, N)
    b_10 = corner(p_logits, below, j, w, o_c, m, N)
    b_11 = corner(p_logits, below, right, w, o_c, m, N)
    x_first = first_of(j, w, columns)
    x_end = tl.where(j < w, first_of(j + 1, w, columns), x_first)
    return o_c, j, m, b_00, b_01, b_10, b_11, x_first, x_end, tl.max(x_end - x_first, 0)


@triton.jit(do_not_specialize=["h", "w", "rows", "columns"])
def loss_forward(
    p_logits, p_labels, p_weights, p_loss, p_sum, h, w, rows, columns,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, IGNORED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Compute the loss and the log-sum-exp of each pixel."""
    line = tl.program_id(0)  # of all images
    image, i = line // h, line % h
    o_c, j, _, b_00, b_01, b_10, b_11, x_first, x_end, wide = cell(
        p_logits, line, tl.program_id(1), h, w, columns, N, BLOCK_N, BLOCK_J
    )
    for y in range(first_of(i, h, rows), first_of(i + 1, h, rows)):
        dy = within(y, h, rows) - i
        b_left, b_right = between(b_00, b_10, dy), between(b_01, b_11, dy)
        for k in range(wide):
            x = x_first + k
            m_x = x < x_end
            b_v = between(b_left, b_right, (within(x, w, columns) - j)[:, None])
            b_v = tl.where((o_c < N)[None, :], b_v, -1e30)
            o = (image * rows + y).to(tl.int64) * columns + x
            label, weight = load_labels(p_labels, p_weights, o, m_x, N, IGNORED, WEIGHTED)
            b_max = tl.max(b_v, 1)
            b_sum = b_max + tl.log(tl.sum(tl.exp(b_v - b_max[:, None]), 1))
            b_own = tl.sum(tl.where(o_c[None, :] == label[:, None], b_v, 0.0), 1)
            tl.store(p_loss + o, tl.where(weight == 0, 0.0, (b_sum - b_own) * weight), mask=m_x)
            tl.store(p_sum + o, b_sum, mask=m_x)


@triton.jit(do_not_specialize=["h", "w", "rows", "columns"])
def loss_backward(
    p_logits, p_labels, p_weights, p_sum, p_gradient, p_parts, h, w, rows, columns,
    N: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_J: tl.constexpr, IGNORED: tl.constexpr, WEIGHTED: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the corners of each cell, (b, h, w, 4, n)."""
    line = tl.program_id(0)
    image, i = line // h, line % h
    o_c, j, m, b_00, b_01, b_10, b_11, x_first, x_end, wide = cell(
        p_logits, line, tl.program_id(1), h, w, columns, N, BLOCK_N, BLOCK_J
    )
    b_d00 = tl.zeros([BLOCK_J, BLOCK_N], tl.float32)
    b_d01 = tl.zeros([BLOCK_J, BLOCK_N], tl.float32)
    b_d10 = tl.zeros([BLOCK_J, BLOCK_N], tl.float32)
    b_d11 = tl.zeros([BLOCK_J, BLOCK_N], tl.float32)
    for y in range(first_of(i, h, rows), first_of(i + 1, h, rows)):
        dy = within(y, h, rows) - i
        b_left, b_right = between(b_00, b_10, dy), between(b_01, b_11, dy)
        b_dleft = tl.zeros([BLOCK_J, BLOCK_N], tl.float32)
        b_dright = tl.zeros([BLOCK_J, BLOCK_N], tl.float32)
        for k in range(wide):
            x = x_first + k
            m_x = x < x_end
            dx = within(x, w, columns) - j
            o = (image * rows + y).to(tl.int64) * columns + x
            label, weight = load_labels(p_labels, p_weights, o, m_x, N, IGNORED, WEIGHTED)
            part = weight * tl.load(p_gradient + o, mask=m_x, other=0.0)
            # Outside the cell the gradient is 0, and this must be finite.
            b_sum = tl.load(p_sum + o, mask=m_x, other=1e30)
            b_p = tl.exp(between(b_left, b_right, dx[:, None]) - b_sum[:, None])
            b_p -= (o_c[None, :] == label[:, None]).to(tl.float32)
            b_dleft += (part * (1 - dx))[:, None] * b_p
            b_dright += (part * dx)[:, None] * b_p
        b_d00 += (1 - dy) * b_dleft
        b_d01 += (1 - dy) * b_dright
        b_d10 += dy * b_dleft
        b_d11 += dy * b_dright
    p = p_parts + (line * w + j).to(tl.int64)[:, None] * (4 * N) + o_c[None, :]
    tl.store(p, b_d00, mask=m)
    tl.store(p + N, b_d01, mask=m)
    tl.store(p + 2 * N, b_d10, mask=m)
    tl.store(p + 3 * N, b_d11, mask=m)


@triton.jit(do_not_specialize=["h", "w"])
def loss_gather(p_parts, p_result, h, w, N: tl.constexpr, BLOCK: tl.constexpr):
    """Add the gradients of the four cells around each position of the small map."""
    line = tl.program_id(0)
    o = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)  # position and class
    j, c = o // N, o % N
    i = line % h + tl.zeros_like(j)
    p = p_parts + (line.to(tl.int64) * w + j) * (4 * N) + c
    m, m_left, m_up = j < w, (j > 0) & (j < w), (i > 0) & (j < w)
    b_acc = tl.load(p, mask=m, other=0.0)
    b_acc += tl.load(p - 3 * N, mask=m_left, other=0.0)
    p -= w.to(tl.int64) * (4 * N)
    b_acc += tl.load(p + 2 * N, mask=m_up, other=0.0)
    b_acc += tl.load(p - N, mask=m_left & m_up, other=0.0)
    o_result = line.to(tl.int64) * w * N + o
    tl.store(p_result + o_result, b_acc.to(p_result.dtype.element_ty), mask=m)
