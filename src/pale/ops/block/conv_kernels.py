"""Kernels of the depthwise convolutions of a block, forward and backward.

All maps are (b, h, w, c), contiguous; sums are in float32 for every dtype of the tensors. Sizes are plain run-time
numbers, never specialised, so that one compilation serves all map sizes.

A convolution walks down the rows of a strip of BLOCK_W columns with the rows around it in registers, each row three
times, shifted by one column: a row is loaded once for three rows of results. Four rows are loaded while the four rows
before them are computed: a loop over single rows has too few loads in flight.

Sums over all tokens (gradients of weights) are written as one partial result per program, and the caller adds
these: no atomics, so the result is deterministic.
"""

import triton
import triton.language as tl

from ..prologue import begin


@triton.jit
def load_row(p_x, i, j, end, w, o_c, m_c, C: tl.constexpr):
    """Load columns j - 1, j, j + 1 of row `i` of a map, (BLOCK_W, BLOCK_C) each; zeros outside it and from `end` on."""
    i = i + tl.zeros_like(j)
    row = (i >= 0) & (i < end)
    p = p_x + (i * w + j)[:, None] * C + o_c[None, :]
    left = tl.load(p - C, mask=(row & (j >= 1) & (j <= w))[:, None] & m_c[None, :], other=0.0)
    here = tl.load(p, mask=(row & (j < w))[:, None] & m_c[None, :], other=0.0)
    right = tl.load(p + C, mask=(row & (j < w - 1))[:, None] & m_c[None, :], other=0.0)
    return left, here, right


@triton.jit
def wide(row):
    """Return the three columns of a row in float32."""
    return row[0].to(tl.float32), row[1].to(tl.float32), row[2].to(tl.float32)


@triton.jit
def load_four(p_x, i, j, end, w, o_c, m_c, C: tl.constexpr):
    """Load rows i to i + 3."""
    r0 = load_row(p_x, i, j, end, w, o_c, m_c, C)
    r1 = load_row(p_x, i + 1, j, end, w, o_c, m_c, C)
    r2 = load_row(p_x, i + 2, j, end, w, o_c, m_c, C)
    r3 = load_row(p_x, i + 3, j, end, w, o_c, m_c, C)
    return r0, r1, r2, r3


@triton.jit
def load_vector(p, j, o_c, m_c):
    """Load one value per channel, repeated for every column: the layout of the map, which needs no conversion."""
    o = o_c[None, :] + tl.zeros_like(j)[:, None]
    return tl.load(p + o, mask=m_c[None, :] & (j >= 0)[:, None], other=0.0).to(tl.float32)


@triton.jit
def load_taps(p_t, j, o_c, m_c, C: tl.constexpr, FLIP: tl.constexpr):
    """Load the taps of each row of the window; FLIP rotates the window by 180 degrees."""
    o: tl.constexpr = 8 if FLIP else 0
    s: tl.constexpr = -1 if FLIP else 1
    t0 = load_vector(p_t + o * C, j, o_c, m_c)
    t1 = load_vector(p_t + (o + s) * C, j, o_c, m_c)
    t2 = load_vector(p_t + (o + 2 * s) * C, j, o_c, m_c)
    t3 = load_vector(p_t + (o + 3 * s) * C, j, o_c, m_c)
    t4 = load_vector(p_t + (o + 4 * s) * C, j, o_c, m_c)
    t5 = load_vector(p_t + (o + 5 * s) * C, j, o_c, m_c)
    t6 = load_vector(p_t + (o + 6 * s) * C, j, o_c, m_c)
    t7 = load_vector(p_t + (o + 7 * s) * C, j, o_c, m_c)
    t8 = load_vector(p_t + (o + 8 * s) * C, j, o_c, m_c)
    return (t0, t1, t2), (t3, t4, t5), (t6, t7, t8)


@triton.jit
def convolve(above, here, below, taps):
    """Return the sum of the window times the taps, (BLOCK_W, BLOCK_C)."""
    b_y = above[0] * taps[0][0] + above[1] * taps[0][1] + above[2] * taps[0][2]
    b_y += here[0] * taps[1][0] + here[1] * taps[1][1] + here[2] * taps[1][2]
    return b_y + below[0] * taps[2][0] + below[1] * taps[2][1] + below[2] * taps[2][2]


@triton.jit
def strip(h, w, rows, BLOCK_W: tl.constexpr):
    """Return image, first row, row after the last, and columns of this program's strip of at most `rows` rows."""
    n_w = (w + BLOCK_W - 1) // BLOCK_W
    n_h = (h + rows - 1) // rows
    pid = tl.program_id(0)
    start = pid // n_w % n_h * rows
    j = pid % n_w * BLOCK_W + tl.arange(0, BLOCK_W)
    return (pid // (n_w * n_h)).to(tl.int64), start, tl.minimum(start + rows, h), j


@triton.jit
def add_four(a0, a1, a2, a3, b0, b1, b2, b3):
    """Add four pairs, for one reduction between threads instead of four."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3


@triton.jit
def store_norm(p_norm, i, j, end, w, b_x, b_r, vectors, o_c, m_c, C: tl.constexpr):
    """Store one row of the norm, from deviations from the mean and reciprocal standard deviations."""
    i = i + tl.zeros_like(j)
    m_y = ((i < end) & (j < w))[:, None] & m_c[None, :]
    o_y = (i * w + j)[:, None] * C + o_c[None, :]
    b_norm = b_x * b_r[:, None] * vectors[1] + vectors[2]
    tl.store(p_norm + o_y, b_norm.to(p_norm.dtype.element_ty), mask=m_y)


@triton.jit
def store_sum(p_sum, i, j, end, w, above, here, below, taps, vectors, o_c, m_c, C: tl.constexpr):
    """Store one row of the sum, and return it in float32."""
    b_x = (here[1] + convolve(above, here, below, taps) + vectors[0]).to(p_sum.dtype.element_ty)
    i = i + tl.zeros_like(j)
    m_y = ((i < end) & (j < w))[:, None] & m_c[None, :]
    tl.store(p_sum + (i * w + j)[:, None] * C + o_c[None, :], b_x, mask=m_y)
    return b_x.to(tl.float32)


@triton.jit
def deviation(b_x, b_sum, m_c, C: tl.constexpr):
    """Return the deviation of the channels of each token from their mean."""
    return tl.where(m_c[None, :], b_x - (b_sum / C)[:, None], 0.0)


@triton.jit(do_not_specialize=["h", "w", "rows"])
def conv_norm(
    p_x, p_t, p_b, p_gamma, p_beta, p_sum, p_norm, h, w, rows, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Compute the sum x + conv(x) + bias, and its LayerNorm."""
    begin()
    image, start, end, j = strip(h, w, rows, BLOCK_W)
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    p_x += image * (h * w * C)
    p_sum += image * (h * w * C)
    p_norm += image * (h * w * C)
    stop = tl.minimum(end + 1, h)
    above = wide(load_row(p_x, start - 1, j, stop, w, o_c, m_c, C))
    here = wide(load_row(p_x, start, j, stop, w, o_c, m_c, C))
    four = load_four(p_x, start + 1, j, stop, w, o_c, m_c, C)
    taps = load_taps(p_t, j, o_c, m_c, C, False)
    b_b = load_vector(p_b, j, o_c, m_c)
    b_gamma = load_vector(p_gamma, j, o_c, m_c)
    b_beta = load_vector(p_beta, j, o_c, m_c)
    vectors = b_b, b_gamma, b_beta
    for i in range(start, end, 4):
        later = load_four(p_x, i + 5, j, stop, w, o_c, m_c, C)
        r0, r1, r2, r3 = wide(four[0]), wide(four[1]), wide(four[2]), wide(four[3])
        x0 = store_sum(p_sum, i, j, end, w, above, here, r0, taps, vectors, o_c, m_c, C)
        x1 = store_sum(p_sum, i + 1, j, end, w, here, r0, r1, taps, vectors, o_c, m_c, C)
        x2 = store_sum(p_sum, i + 2, j, end, w, r0, r1, r2, taps, vectors, o_c, m_c, C)
        x3 = store_sum(p_sum, i + 3, j, end, w, r1, r2, r3, taps, vectors, o_c, m_c, C)
        s0, s1, s2, s3 = tl.reduce((x0, x1, x2, x3), 1, add_four)
        x0, x1 = deviation(x0, s0, m_c, C), deviation(x1, s1, m_c, C)
        x2, x3 = deviation(x2, s2, m_c, C), deviation(x3, s3, m_c, C)
        s0, s1, s2, s3 = tl.reduce((x0 * x0, x1 * x1, x2 * x2, x3 * x3), 1, add_four)
        b_r = tl.math.rsqrt(s0 / C + eps)
        store_norm(p_norm, i, j, end, w, x0, b_r, vectors, o_c, m_c, C)
        b_r = tl.math.rsqrt(s1 / C + eps)
        store_norm(p_norm, i + 1, j, end, w, x1, b_r, vectors, o_c, m_c, C)
        b_r = tl.math.rsqrt(s2 / C + eps)
        store_norm(p_norm, i + 2, j, end, w, x2, b_r, vectors, o_c, m_c, C)
        b_r = tl.math.rsqrt(s3 / C + eps)
        store_norm(p_norm, i + 3, j, end, w, x3, b_r, vectors, o_c, m_c, C)
        above, here, four = r2, r3, later


@triton.jit
def three_sums(p_y, n, i, j, end, w, above, here, below, taps, o_c, m_c, C: tl.constexpr):
    """Store one row of `conv_three`."""
    i = i + tl.zeros_like(j)
    m_y = ((i < end) & (j < w))[:, None] & m_c[None, :]
    p = p_y + (i * w + j)[:, None] * C + o_c[None, :]
    b_y = convolve(above, here, below, taps[0])
    tl.store(p, b_y.to(p_y.dtype.element_ty), mask=m_y)
    b_y = convolve(above, here, below, taps[1])
    tl.store(p + n, b_y.to(p_y.dtype.element_ty), mask=m_y)
    b_y = convolve(above, here, below, taps[2])
    tl.store(p + 2 * n, b_y.to(p_y.dtype.element_ty), mask=m_y)


@triton.jit
def load_taps_three(p_t, j, o_c, m_c, C: tl.constexpr, FLIP: tl.constexpr):
    """Load the taps of three convolutions."""
    t0 = load_taps(p_t, j, o_c, m_c, C, FLIP)
    t1 = load_taps(p_t + 9 * C, j, o_c, m_c, C, FLIP)
    t2 = load_taps(p_t + 18 * C, j, o_c, m_c, C, FLIP)
    return t0, t1, t2


@triton.jit(do_not_specialize=["tokens", "h", "w", "rows"])
def conv_three(
    p_x, p_t, p_y, tokens, h, w, rows,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Compute three convolutions of one map, (3, b, h, w, c); `tokens` is b*h*w."""
    begin()
    image, start, end, j = strip(h, w, rows, BLOCK_W)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    p_x += image * (h * w * C)
    p_y += image * (h * w * C)
    n = tokens.to(tl.int64) * C
    stop = tl.minimum(end + 1, h)
    above = wide(load_row(p_x, start - 1, j, stop, w, o_c, m_c, C))
    here = wide(load_row(p_x, start, j, stop, w, o_c, m_c, C))
    four = load_four(p_x, start + 1, j, stop, w, o_c, m_c, C)
    taps = load_taps_three(p_t, j, o_c, m_c, C, False)
    for i in range(start, end, 4):
        later = load_four(p_x, i + 5, j, stop, w, o_c, m_c, C)
        r0, r1, r2, r3 = wide(four[0]), wide(four[1]), wide(four[2]), wide(four[3])
        three_sums(p_y, n, i, j, end, w, above, here, r0, taps, o_c, m_c, C)
        three_sums(p_y, n, i + 1, j, end, w, here, r0, r1, taps, o_c, m_c, C)
        three_sums(p_y, n, i + 2, j, end, w, r0, r1, r2, taps, o_c, m_c, C)
        three_sums(p_y, n, i + 3, j, end, w, r1, r2, r3, taps, o_c, m_c, C)
        above, here, four = r2, r3, later


@triton.jit
def load_three(p_g, n, i, j, end, w, o_c, m_c, C: tl.constexpr):
    """Load row `i` of the gradients of three maps."""
    g0 = load_row(p_g, i, j, end, w, o_c, m_c, C)
    g1 = load_row(p_g + n, i, j, end, w, o_c, m_c, C)
    g2 = load_row(p_g + 2 * n, i, j, end, w, o_c, m_c, C)
    return g0, g1, g2


@triton.jit
def wide_three(rows):
    """Return three rows in float32."""
    return wide(rows[0]), wide(rows[1]), wide(rows[2])


@triton.jit
def sum_of_three(p_dx, i, j, end, w, above, here, below, taps, o_c, m_c, C: tl.constexpr):
    """Store one row of `conv_three_backward_x`."""
    b_dx = convolve(above[0], here[0], below[0], taps[0])
    b_dx += convolve(above[1], here[1], below[1], taps[1])
    b_dx += convolve(above[2], here[2], below[2], taps[2])
    i = i + tl.zeros_like(j)
    m_y = ((i < end) & (j < w))[:, None] & m_c[None, :]
    p = p_dx + (i * w + j)[:, None] * C + o_c[None, :]
    tl.store(p, b_dx.to(p_dx.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=["tokens", "h", "w", "rows"])
def conv_three_backward_x(
    p_g, p_t, p_dx, tokens, h, w, rows,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the input of three convolutions from theirs, (3, b, h, w, c), two rows at a time."""
    image, start, end, j = strip(h, w, rows, BLOCK_W)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    p_g += image * (h * w * C)
    p_dx += image * (h * w * C)
    n = tokens.to(tl.int64) * C
    stop = tl.minimum(end + 1, h)
    above = wide_three(load_three(p_g, n, start - 1, j, stop, w, o_c, m_c, C))
    here = wide_three(load_three(p_g, n, start, j, stop, w, o_c, m_c, C))
    next0 = load_three(p_g, n, start + 1, j, stop, w, o_c, m_c, C)
    next1 = load_three(p_g, n, start + 2, j, stop, w, o_c, m_c, C)
    taps = load_taps_three(p_t, j, o_c, m_c, C, True)
    for i in range(start, end, 2):
        later0 = load_three(p_g, n, i + 3, j, stop, w, o_c, m_c, C)
        later1 = load_three(p_g, n, i + 4, j, stop, w, o_c, m_c, C)
        r0, r1 = wide_three(next0), wide_three(next1)
        sum_of_three(p_dx, i, j, end, w, above, here, r0, taps, o_c, m_c, C)
        sum_of_three(p_dx, i + 1, j, end, w, here, r0, r1, taps, o_c, m_c, C)
        above, here, next0, next1 = r0, r1, later0, later1


@triton.jit
def sum_with_residual(p_dx, i, j, end, w, above, here, below, taps, o_c, m_c, C: tl.constexpr):
    """Store one row of `conv_backward_x`."""
    b_dx = here[1] + convolve(above, here, below, taps)
    i = i + tl.zeros_like(j)
    m_y = ((i < end) & (j < w))[:, None] & m_c[None, :]
    p = p_dx + (i * w + j)[:, None] * C + o_c[None, :]
    tl.store(p, b_dx.to(p_dx.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=["h", "w", "rows"])
def conv_backward_x(
    p_g, p_t, p_dx, h, w, rows,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x of the sum x + conv(x)."""
    image, start, end, j = strip(h, w, rows, BLOCK_W)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    p_g += image * (h * w * C)
    p_dx += image * (h * w * C)
    stop = tl.minimum(end + 1, h)
    above = wide(load_row(p_g, start - 1, j, stop, w, o_c, m_c, C))
    here = wide(load_row(p_g, start, j, stop, w, o_c, m_c, C))
    four = load_four(p_g, start + 1, j, stop, w, o_c, m_c, C)
    taps = load_taps(p_t, j, o_c, m_c, C, True)
    for i in range(start, end, 4):
        later = load_four(p_g, i + 5, j, stop, w, o_c, m_c, C)
        r0, r1, r2, r3 = wide(four[0]), wide(four[1]), wide(four[2]), wide(four[3])
        sum_with_residual(p_dx, i, j, end, w, above, here, r0, taps, o_c, m_c, C)
        sum_with_residual(p_dx, i + 1, j, end, w, here, r0, r1, taps, o_c, m_c, C)
        sum_with_residual(p_dx, i + 2, j, end, w, r0, r1, r2, taps, o_c, m_c, C)
        sum_with_residual(p_dx, i + 3, j, end, w, r1, r2, r3, taps, o_c, m_c, C)
        above, here, four = r2, r3, later


@triton.jit
def correlate(sums, above, here, below, b_g):
    """Add the window times the gradient to nine sums."""
    a, b, c = sums
    a = a[0] + above[0] * b_g, a[1] + above[1] * b_g, a[2] + above[2] * b_g
    b = b[0] + here[0] * b_g, b[1] + here[1] * b_g, b[2] + here[2] * b_g
    c = c[0] + below[0] * b_g, c[1] + below[1] * b_g, c[2] + below[2] * b_g
    return a, b, c


@triton.jit
def zero_sums(BLOCK_W: tl.constexpr, BLOCK_C: tl.constexpr):
    """Return nine zero sums."""
    z = tl.zeros([BLOCK_W, BLOCK_C], tl.float32)
    return (z, z, z), (z, z, z), (z, z, z)


@triton.jit
def add_nine(a0, a1, a2, a3, a4, a5, a6, a7, a8, b0, b1, b2, b3, b4, b5, b6, b7, b8):
    """Add nine pairs, for one reduction between threads instead of nine."""
    return a0 + b0, a1 + b1, a2 + b2, a3 + b3, a4 + b4, a5 + b5, a6 + b6, a7 + b7, a8 + b8


@triton.jit
def store_sums(p_dt, sums, o_c, m_c, C: tl.constexpr):
    """Store the nine sums over the columns of a strip, (9, c)."""
    a, b, c = sums
    nine = (a[0], a[1], a[2], b[0], b[1], b[2], c[0], c[1], c[2])
    nine = tl.reduce(nine, 0, add_nine)
    for t in tl.static_range(9):
        tl.store(p_dt + t * C + o_c, nine[t], mask=m_c)


@triton.jit
def correlate_three(sums, above, here, below, g, THREE: tl.constexpr):
    """Add one row to the sums of one map or of three."""
    s0, s1, s2 = sums
    s0 = correlate(s0, above, here, below, g[0].to(tl.float32))
    if THREE:
        s1 = correlate(s1, above, here, below, g[1].to(tl.float32))
        s2 = correlate(s2, above, here, below, g[2].to(tl.float32))
    return s0, s1, s2


@triton.jit
def walk(p_x, row, first, images, h, size):
    """Return map pointer and row for row `row` of several images in sequence, with one row of zeros after each.

    The last value is the end of the rows of the map; it is not above the row if the row is outside.
    """
    image = row // (h + 1)
    i = row % (h + 1)
    return p_x + (first + image) * size, i, tl.where(image < images, h, 0)


@triton.jit
def load_map_row(p_x, row, first, images, h, w, size, j, o_c, m_c, C: tl.constexpr):
    """Load a row of several images in sequence, like `load_row`."""
    p, i, end = walk(p_x, row, first, images, h, size)
    return load_row(p, i, j, end, w, o_c, m_c, C)


@triton.jit
def load_gradients(
    p_g, n, row, first, images, h, w, size, j, o_c, m_c, C: tl.constexpr, THREE: tl.constexpr
):
    """Load row `row` of the gradients of one map (returned three times) or of three maps."""
    p, i, end = walk(p_g, row, first, images, h, size)
    i = i + tl.zeros_like(j)
    m_g = ((i < end) & (j < w))[:, None] & m_c[None, :]
    p = p + (i * w + j)[:, None] * C + o_c[None, :]
    b_0 = tl.load(p, mask=m_g, other=0.0)
    b_1 = b_0
    b_2 = b_0
    if THREE:
        b_1 = tl.load(p + n, mask=m_g, other=0.0)
        b_2 = tl.load(p + 2 * n, mask=m_g, other=0.0)
    return b_0, b_1, b_2


@triton.jit(do_not_specialize=["images", "h", "w", "each"])
def conv_backward_w(
    p_x, p_g, p_dt, images, h, w, each,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr, THREE: tl.constexpr,
):  # fmt: skip
    """Compute partial gradients, (programs, 9 or 27, c), of the taps of one map; `each` images per program.

    Rows are processed in pairs, across image boundaries: the row of zeros between two images is the border below the
    first and above the second.
    """
    n_w = (w + BLOCK_W - 1) // BLOCK_W
    pid = tl.program_id(0)
    j = pid % n_w * BLOCK_W + tl.arange(0, BLOCK_W)
    f = pid // n_w * each
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    size = (h * w).to(tl.int64) * C
    n = size * images
    m = tl.minimum(each, images - f)
    zero = zero_sums(BLOCK_W, BLOCK_C)
    sums = zero, zero, zero
    here = load_map_row(p_x, 0, f, m, h, w, size, j, o_c, m_c, C)
    next0 = load_map_row(p_x, 1, f, m, h, w, size, j, o_c, m_c, C)
    next1 = load_map_row(p_x, 2, f, m, h, w, size, j, o_c, m_c, C)
    g0 = load_gradients(p_g, n, 0, f, m, h, w, size, j, o_c, m_c, C, THREE)
    g1 = load_gradients(p_g, n, 1, f, m, h, w, size, j, o_c, m_c, C, THREE)
    here = wide(here)
    above = here[0] * 0.0, here[1] * 0.0, here[2] * 0.0
    for row in range(0, m * (h + 1), 2):
        later0 = load_map_row(p_x, row + 3, f, m, h, w, size, j, o_c, m_c, C)
        later1 = load_map_row(p_x, row + 4, f, m, h, w, size, j, o_c, m_c, C)
        g2 = load_gradients(p_g, n, row + 2, f, m, h, w, size, j, o_c, m_c, C, THREE)
        g3 = load_gradients(p_g, n, row + 3, f, m, h, w, size, j, o_c, m_c, C, THREE)
        r0, r1 = wide(next0), wide(next1)
        sums = correlate_three(sums, above, here, r0, g0, THREE)
        sums = correlate_three(sums, here, r0, r1, g1, THREE)
        above, here, next0, next1 = r0, r1, later0, later1
        g0, g1 = g2, g3
    p_dt += pid.to(tl.int64) * ((27 if THREE else 9) * C)
    store_sums(p_dt, sums[0], o_c, m_c, C)
    if THREE:
        store_sums(p_dt + 9 * C, sums[1], o_c, m_c, C)
        store_sums(p_dt + 18 * C, sums[2], o_c, m_c, C)
