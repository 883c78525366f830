"""Kernels for what surrounds the attention in a block: depthwise convolutions, norms, residuals, GELU.

All maps are (b, h, w, c), contiguous; sums are in float32 whatever the tensors are. Sizes are plain run-time numbers,
never specialised, so that one compilation serves all map sizes.

A convolution walks down the rows of a strip of BLOCK_W columns with the rows around it in registers, each row three
times, shifted by one column: a row is loaded once for three rows of results. Rows come in fours, loaded while the four
before them are computed: what limits a loop over single rows is that too few bytes are under way.

Sums over all tokens (gradients of weights) end as one partial result for each program, summed by the caller: no
atomics, the same result every time.
"""

import triton
import triton.language as tl


@triton.jit
def load_row(p_x, i, j, end, w, o_c, m_c, C: tl.constexpr):
    """Columns j - 1, j, j + 1 of row `i` of a map, (BLOCK_W, BLOCK_C) each; zeros outside it and from `end` on."""
    i = i + tl.zeros_like(j)
    row = (i >= 0) & (i < end)
    p = p_x + (i * w + j)[:, None] * C + o_c[None, :]
    left = tl.load(p - C, mask=(row & (j >= 1) & (j <= w))[:, None] & m_c[None, :], other=0.0)
    here = tl.load(p, mask=(row & (j < w))[:, None] & m_c[None, :], other=0.0)
    right = tl.load(p + C, mask=(row & (j < w - 1))[:, None] & m_c[None, :], other=0.0)
    return left, here, right


@triton.jit
def wide(row):
    """The three columns of a row in float32."""
    return row[0].to(tl.float32), row[1].to(tl.float32), row[2].to(tl.float32)


@triton.jit
def load_four(p_x, i, j, end, w, o_c, m_c, C: tl.constexpr):
    """Rows i to i + 3."""
    r0 = load_row(p_x, i, j, end, w, o_c, m_c, C)
    r1 = load_row(p_x, i + 1, j, end, w, o_c, m_c, C)
    r2 = load_row(p_x, i + 2, j, end, w, o_c, m_c, C)
    r3 = load_row(p_x, i + 3, j, end, w, o_c, m_c, C)
    return r0, r1, r2, r3


@triton.jit
def load_tap(p_t, o_c, m_c, t: tl.constexpr, C: tl.constexpr):
    """Tap `t` of each channel, from (9, c)."""
    return tl.load(p_t + t * C + o_c, mask=m_c, other=0.0)[None, :]


@triton.jit
def load_taps(p_t, o_c, m_c, C: tl.constexpr, FLIP: tl.constexpr):
    """The taps of each row of the window; FLIP turns the window by 180 degrees."""
    o: tl.constexpr = 8 if FLIP else 0
    s: tl.constexpr = -1 if FLIP else 1
    t0 = load_tap(p_t, o_c, m_c, o, C)
    t1 = load_tap(p_t, o_c, m_c, o + s, C)
    t2 = load_tap(p_t, o_c, m_c, o + 2 * s, C)
    t3 = load_tap(p_t, o_c, m_c, o + 3 * s, C)
    t4 = load_tap(p_t, o_c, m_c, o + 4 * s, C)
    t5 = load_tap(p_t, o_c, m_c, o + 5 * s, C)
    t6 = load_tap(p_t, o_c, m_c, o + 6 * s, C)
    t7 = load_tap(p_t, o_c, m_c, o + 7 * s, C)
    t8 = load_tap(p_t, o_c, m_c, o + 8 * s, C)
    return (t0, t1, t2), (t3, t4, t5), (t6, t7, t8)


@triton.jit
def convolve(above, here, below, taps):
    """The window times the taps, (BLOCK_W, BLOCK_C)."""
    b_y = above[0] * taps[0][0] + above[1] * taps[0][1] + above[2] * taps[0][2]
    b_y += here[0] * taps[1][0] + here[1] * taps[1][1] + here[2] * taps[1][2]
    return b_y + below[0] * taps[2][0] + below[1] * taps[2][1] + below[2] * taps[2][2]


@triton.jit
def strip(h, w, rows, BLOCK_W: tl.constexpr):
    """Image, first row, row after the last, and columns of this program's strip of at most `rows` rows."""
    n_w = (w + BLOCK_W - 1) // BLOCK_W
    n_h = (h + rows - 1) // rows
    pid = tl.program_id(0)
    start = pid // n_w % n_h * rows
    j = pid % n_w * BLOCK_W + tl.arange(0, BLOCK_W)
    return (pid // (n_w * n_h)).to(tl.int64), start, tl.minimum(start + rows, h), j


@triton.jit
def normalise(b_x, m_c, eps, C: tl.constexpr):
    """Rows of `b_x`, (tokens, BLOCK_C), at mean 0 and variance 1, and the reciprocals of their deviations."""
    b_mean = tl.sum(b_x, 1) / C
    b_x = tl.where(m_c[None, :], b_x - b_mean[:, None], 0.0)
    b_r = tl.math.rsqrt(tl.sum(b_x * b_x, 1) / C + eps)
    return b_x * b_r[:, None], b_r


@triton.jit
def sum_and_norm(
    p_sum, p_norm, i, j, end, w, above, here, below, taps, vectors, eps, o_c, m_c, C: tl.constexpr
):
    """One row of `conv_norm`."""
    b_b, b_gamma, b_beta = vectors
    b_out = (here[1] + convolve(above, here, below, taps) + b_b).to(p_sum.dtype.element_ty)
    b_norm, _ = normalise(b_out.to(tl.float32), m_c, eps, C)
    b_norm = b_norm * b_gamma + b_beta
    i = i + tl.zeros_like(j)
    m_y = ((i < end) & (j < w))[:, None] & m_c[None, :]
    o_y = (i * w + j)[:, None] * C + o_c[None, :]
    tl.store(p_sum + o_y, b_out, mask=m_y)
    tl.store(p_norm + o_y, b_norm.to(p_norm.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=["h", "w", "rows"])
def conv_norm(
    p_x, p_t, p_b, p_gamma, p_beta, p_sum, p_norm, h, w, rows, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """The sum x + conv(x) + bias, and its LayerNorm."""
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
    taps = load_taps(p_t, o_c, m_c, C, False)
    b_b = tl.load(p_b + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_gamma = tl.load(p_gamma + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_beta = tl.load(p_beta + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    vectors = b_b, b_gamma, b_beta
    for i in range(start, end, 4):
        later = load_four(p_x, i + 5, j, stop, w, o_c, m_c, C)
        r0, r1, r2, r3 = wide(four[0]), wide(four[1]), wide(four[2]), wide(four[3])
        sum_and_norm(p_sum, p_norm, i, j, end, w, above, here, r0, taps, vectors, eps, o_c, m_c, C)
        sum_and_norm(p_sum, p_norm, i + 1, j, end, w, here, r0, r1, taps, vectors, eps, o_c, m_c, C)
        sum_and_norm(p_sum, p_norm, i + 2, j, end, w, r0, r1, r2, taps, vectors, eps, o_c, m_c, C)
        sum_and_norm(p_sum, p_norm, i + 3, j, end, w, r1, r2, r3, taps, vectors, eps, o_c, m_c, C)
        above, here, four = r2, r3, later


@triton.jit
def three_sums(p_y, n, i, j, end, w, above, here, below, taps, o_c, m_c, C: tl.constexpr):
    """One row of `conv_three`."""
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
def load_taps_three(p_t, o_c, m_c, C: tl.constexpr, FLIP: tl.constexpr):
    """Those of three convolutions."""
    t0 = load_taps(p_t, o_c, m_c, C, FLIP)
    t1 = load_taps(p_t + 9 * C, o_c, m_c, C, FLIP)
    t2 = load_taps(p_t + 18 * C, o_c, m_c, C, FLIP)
    return t0, t1, t2


@triton.jit(do_not_specialize=["tokens", "h", "w", "rows"])
def conv_three(
    p_x, p_t, p_y, tokens, h, w, rows,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Three convolutions of one map into (3, b, h, w, c); `tokens` is b*h*w."""
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
    taps = load_taps_three(p_t, o_c, m_c, C, False)
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
    """Row `i` of the gradients of three maps."""
    g0 = load_row(p_g, i, j, end, w, o_c, m_c, C)
    g1 = load_row(p_g + n, i, j, end, w, o_c, m_c, C)
    g2 = load_row(p_g + 2 * n, i, j, end, w, o_c, m_c, C)
    return g0, g1, g2


@triton.jit
def wide_three(rows):
    """Three rows in float32."""
    return wide(rows[0]), wide(rows[1]), wide(rows[2])


@triton.jit
def sum_of_three(p_dx, i, j, end, w, above, here, below, taps, o_c, m_c, C: tl.constexpr):
    """One row of `conv_three_backward_x`."""
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
    """Gradient of the map under three convolutions, from theirs, (3, b, h, w, c); rows come in twos."""
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
    taps = load_taps_three(p_t, o_c, m_c, C, True)
    for i in range(start, end, 2):
        later0 = load_three(p_g, n, i + 3, j, stop, w, o_c, m_c, C)
        later1 = load_three(p_g, n, i + 4, j, stop, w, o_c, m_c, C)
        r0, r1 = wide_three(next0), wide_three(next1)
        sum_of_three(p_dx, i, j, end, w, above, here, r0, taps, o_c, m_c, C)
        sum_of_three(p_dx, i + 1, j, end, w, here, r0, r1, taps, o_c, m_c, C)
        above, here, next0, next1 = r0, r1, later0, later1


@triton.jit
def sum_with_residual(p_dx, i, j, end, w, above, here, below, taps, o_c, m_c, C: tl.constexpr):
    """One row of `conv_backward_x`."""
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
    """Gradient of x under x + conv(x)."""
    image, start, end, j = strip(h, w, rows, BLOCK_W)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    p_g += image * (h * w * C)
    p_dx += image * (h * w * C)
    stop = tl.minimum(end + 1, h)
    above = wide(load_row(p_g, start - 1, j, stop, w, o_c, m_c, C))
    here = wide(load_row(p_g, start, j, stop, w, o_c, m_c, C))
    four = load_four(p_g, start + 1, j, stop, w, o_c, m_c, C)
    taps = load_taps(p_t, o_c, m_c, C, True)
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
    """Nine sums to start with."""
    z = tl.zeros([BLOCK_W, BLOCK_C], tl.float32)
    return (z, z, z), (z, z, z), (z, z, z)


@triton.jit
def store_sums(p_dt, sums, o_c, m_c, C: tl.constexpr):
    """The nine sums over the columns of a strip, (9, c)."""
    for r in tl.static_range(3):
        for t in tl.static_range(3):
            tl.store(p_dt + (3 * r + t) * C + o_c, tl.sum(sums[r][t], 0), mask=m_c)


@triton.jit
def load_gradients(p_g, n, i, j, h, w, o_c, m_c, C: tl.constexpr, THREE: tl.constexpr):
    """Row `i` of the gradients of one map, three times the same, or of three."""
    i = i + tl.zeros_like(j)
    m_g = ((i < h) & (j < w))[:, None] & m_c[None, :]
    p = p_g + (i * w + j)[:, None] * C + o_c[None, :]
    b_0 = tl.load(p, mask=m_g, other=0.0)
    b_1 = b_0
    b_2 = b_0
    if THREE:
        b_1 = tl.load(p + n, mask=m_g, other=0.0)
        b_2 = tl.load(p + 2 * n, mask=m_g, other=0.0)
    return b_0, b_1, b_2


@triton.jit
def correlate_three(sums, above, here, below, g, THREE: tl.constexpr):
    """Add one row to the sums of one map or three."""
    s0, s1, s2 = sums
    s0 = correlate(s0, above, here, below, g[0].to(tl.float32))
    if THREE:
        s1 = correlate(s1, above, here, below, g[1].to(tl.float32))
        s2 = correlate(s2, above, here, below, g[2].to(tl.float32))
    return s0, s1, s2


@triton.jit(do_not_specialize=["images", "h", "w", "each"])
def conv_backward_w(
    p_x, p_g, p_dt, images, h, w, each,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_W: tl.constexpr, THREE: tl.constexpr,
):  # fmt: skip
    """Partial gradients, (programs, 9 or 27, c), of the taps of convolutions of one map; `each` images a program.

    Rows come in twos.
    """
    n_w = (w + BLOCK_W - 1) // BLOCK_W
    pid = tl.program_id(0)
    j = pid % n_w * BLOCK_W + tl.arange(0, BLOCK_W)
    first = pid // n_w * each
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    size = (h * w).to(tl.int64) * C
    n = size * images
    zero = zero_sums(BLOCK_W, BLOCK_C)
    sums = zero, zero, zero
    for image in range(first, tl.minimum(first + each, images)):
        p_map = p_x + image * size
        p_grad = p_g + image * size
        here = load_row(p_map, 0, j, h, w, o_c, m_c, C)
        next0 = load_row(p_map, 1, j, h, w, o_c, m_c, C)
        next1 = load_row(p_map, 2, j, h, w, o_c, m_c, C)
        g0 = load_gradients(p_grad, n, 0, j, h, w, o_c, m_c, C, THREE)
        g1 = load_gradients(p_grad, n, 1, j, h, w, o_c, m_c, C, THREE)
        here = wide(here)
        above = here[0] * 0.0, here[1] * 0.0, here[2] * 0.0
        for i in range(0, h, 2):
            later0 = load_row(p_map, i + 3, j, h, w, o_c, m_c, C)
            later1 = load_row(p_map, i + 4, j, h, w, o_c, m_c, C)
            g2 = load_gradients(p_grad, n, i + 2, j, h, w, o_c, m_c, C, THREE)
            g3 = load_gradients(p_grad, n, i + 3, j, h, w, o_c, m_c, C, THREE)
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


@triton.jit(do_not_specialize=["tokens", "per_image"])
def add_norm(
    p_x, p_y, p_bias, p_scale, p_next, p_gamma, p_beta, p_sum, p_norm, tokens, per_image, eps,
    ADD: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, NEXT: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The sum x + scale (y + bias), and its LayerNorm; `scale` is one number an image. Without y, LayerNorm(x + bias).

    `next` is a bias that the next layer will add to the sum: it is stored with it, after the norm.
    """
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    m_x = (o_t < tokens)[:, None] & m_c[None, :]
    o_x = o_t[:, None] * C + o_c[None, :]
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    if BIAS:
        b_bias = tl.load(p_bias + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
        if not ADD:
            b_x += b_bias
    if ADD:
        b_y = tl.load(p_y + o_x, mask=m_x, other=0.0).to(tl.float32)
        if BIAS:
            b_y += b_bias
        if SCALE:
            b_y *= tl.load(p_scale + o_t // per_image, mask=o_t < tokens, other=0.0).to(tl.float32)[
                :, None
            ]
        b_x = (b_x + b_y).to(p_sum.dtype.element_ty).to(tl.float32)
        b_out = b_x
        if NEXT:
            b_out += tl.load(p_next + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
        tl.store(p_sum + o_x, b_out.to(p_sum.dtype.element_ty), mask=m_x)
    b_norm, _ = normalise(b_x, m_c, eps, C)
    b_gamma = tl.load(p_gamma + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_beta = tl.load(p_beta + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    tl.store(p_norm + o_x, (b_norm * b_gamma + b_beta).to(p_norm.dtype.element_ty), mask=m_x)


@triton.jit
def load_gradients_of_norm(
    p_x, p_g, p_gx, o_t, tokens, o_c, m_c, ADD: tl.constexpr, C: tl.constexpr
):
    """A block of x and of the two gradients."""
    m_x = (o_t < tokens)[:, None] & m_c[None, :]
    o_x = o_t[:, None] * C + o_c[None, :]
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0)
    b_g = tl.load(p_g + o_x, mask=m_x, other=0.0)
    b_gx = b_g
    if ADD:
        b_gx = tl.load(p_gx + o_x, mask=m_x, other=0.0)
    return b_x, b_g, b_gx


@triton.jit(do_not_specialize=["tokens", "per_image", "each"])
def norm_backward(
    p_g, p_gx, p_x, p_gamma, p_scale, p_dx, p_dy, p_sums, tokens, per_image, each, eps,
    ADD: tl.constexpr, SCALE: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Gradient of x under (x, LayerNorm(x)); partial sums over `each` blocks of tokens, (programs, 3, c).

    With a scale for each image also the gradient times that scale, of a y that x is made of. The sums are the gradients
    of gamma and beta, and of a bias in x, or in y.
    """
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    b_gamma = tl.load(p_gamma + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_dgamma = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    b_dbeta = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    b_total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    first = tl.program_id(0).to(tl.int64) * each * BLOCK_T
    o_t = first + tl.arange(0, BLOCK_T)
    n_x, n_g, n_gx = load_gradients_of_norm(p_x, p_g, p_gx, o_t, tokens, o_c, m_c, ADD, C)
    for _ in range(0, each):
        b_x, b_g, b_gx = n_x.to(tl.float32), n_g.to(tl.float32), n_gx.to(tl.float32)
        m_x = (o_t < tokens)[:, None] & m_c[None, :]
        o_x = o_t[:, None] * C + o_c[None, :]
        o_s = o_t
        o_t += BLOCK_T
        n_x, n_g, n_gx = load_gradients_of_norm(p_x, p_g, p_gx, o_t, tokens, o_c, m_c, ADD, C)
        b_norm, b_r = normalise(b_x, m_c, eps, C)
        b_dgamma += b_g * b_norm
        b_dbeta += b_g
        b_g *= b_gamma
        b_dx = b_g - (tl.sum(b_g, 1) / C)[:, None] - b_norm * (tl.sum(b_g * b_norm, 1) / C)[:, None]
        b_dx *= b_r[:, None]
        if ADD:
            b_dx += b_gx
        b_dx = tl.where(m_x, b_dx, 0.0)
        tl.store(p_dx + o_x, b_dx.to(p_dx.dtype.element_ty), mask=m_x)
        if SCALE:
            b_dx *= tl.load(p_scale + o_s // per_image, mask=o_s < tokens, other=0.0).to(
                tl.float32
            )[:, None]
            tl.store(p_dy + o_x, b_dx.to(p_dy.dtype.element_ty), mask=m_x)
        b_total += b_dx
    p_sums += tl.program_id(0) * (3 * C) + o_c
    tl.store(p_sums, tl.sum(b_dgamma, 0), mask=m_c)
    tl.store(p_sums + C, tl.sum(b_dbeta, 0), mask=m_c)
    tl.store(p_sums + 2 * C, tl.sum(b_total, 0), mask=m_c)


@triton.jit
def gelu(b_x):
    """Results x Phi(x) and 1 - Phi(|x|); Phi is the normal distribution function.

    Its tail by Abramowitz and Stegun 7.1.26, to 1.5e-7: half the instructions of the library's erf.
    """
    b_t = 1.0 / (1.0 + 0.23164190 * tl.abs(b_x))
    b_p = 0.5307027145 * b_t - 0.7265760135
    b_p = b_p * b_t + 0.7107068705
    b_p = b_p * b_t - 0.142248368
    b_p = b_p * b_t + 0.127414796
    b_tail = b_p * b_t * tl.math.exp2(b_x * b_x * -0.7213475204444817)
    return tl.maximum(b_x, 0.0) - tl.abs(b_x) * b_tail, b_tail


@triton.jit(do_not_specialize=["n_16"])
def gelu_forward(p_h, p_a, n_16, BLOCK: tl.constexpr):
    """GELU of 16 `n_16` numbers; said this way, Triton knows that it can load eight at a time."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    n = n_16.to(tl.int64) * 16
    b_a, _ = gelu(tl.load(p_h + o, mask=o < n, other=0.0).to(tl.float32))
    tl.store(p_a + o, b_a.to(p_a.dtype.element_ty), mask=o < n)


@triton.jit(do_not_specialize=["tokens", "each"])
def gelu_backward(
    p_h, p_g, p_a, p_dh, p_sums, tokens, each,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """GELU(h) once more, the gradient of h, and its partial sums over `each` blocks of tokens, (programs, c)."""
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    b_total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    first = tl.program_id(0).to(tl.int64) * each * BLOCK_T
    for block in range(0, each):
        o_t = first + block * BLOCK_T + tl.arange(0, BLOCK_T)
        m_x = (o_t < tokens)[:, None] & m_c[None, :]
        o_x = o_t[:, None] * C + o_c[None, :]
        b_h = tl.load(p_h + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_g = tl.load(p_g + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_a, b_tail = gelu(b_h)
        b_phi = tl.where(b_h > 0, 1.0 - b_tail, b_tail)
        b_dh = b_g * (
            b_phi + b_h * 0.3989422804014327 * tl.math.exp2(b_h * b_h * -0.7213475204444817)
        )
        b_total += b_dh
        tl.store(p_a + o_x, b_a.to(p_a.dtype.element_ty), mask=m_x)
        tl.store(p_dh + o_x, b_dh.to(p_dh.dtype.element_ty), mask=m_x)
    tl.store(p_sums + tl.program_id(0) * C + o_c, tl.sum(b_total, 0), mask=m_c)


@triton.jit(do_not_specialize=["rows", "columns_16", "each"])
def sum_rows(
    p_x, p_sums, rows, columns_16, each,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums of the columns of (rows, 16 columns_16), over `each` rows a program: (programs, 16 columns_16)."""
    columns = columns_16 * 16
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first = tl.program_id(0).to(tl.int64) * each
    b_sum = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for row in range(0, each, BLOCK_R):
        o_r = row + tl.arange(0, BLOCK_R)
        m_x = ((o_r < each) & (first + o_r < rows))[:, None] & (o_c < columns)[None, :]
        p = p_x + (first + o_r)[:, None] * columns + o_c[None, :]
        b_sum += tl.load(p, mask=m_x, other=0.0).to(tl.float32)
    p_sums += tl.program_id(0).to(tl.int64) * columns + o_c
    tl.store(p_sums, tl.sum(b_sum, 0).to(p_sums.dtype.element_ty), mask=o_c < columns)


@triton.jit(do_not_specialize=["tokens"])
def linear_norm(
    p_y, p_w, p_b, p_x, p_next, p_gamma, p_beta, p_sum, p_norm, tokens, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The sum x + y W^T + b, and its LayerNorm; `w` is (c, c), BLOCK_K divides c, a program has whole rows.

    `next` is a bias that the next layer will add to the sum: it is stored with it, after the norm.
    """
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < tokens
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    o_k = tl.arange(0, BLOCK_K)
    p_yt = p_y + o_t[:, None] * C + o_k[None, :]
    p_wt = p_w + o_c[None, :] * C + o_k[:, None]
    b_acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for k in tl.range(0, C, BLOCK_K):
        b_y = tl.load(p_yt + k, mask=m_t[:, None], other=0.0)
        b_w = tl.load(p_wt + k, mask=m_c[None, :], other=0.0)
        b_acc = tl.dot(b_y, b_w, b_acc, input_precision="ieee")
    m_x = m_t[:, None] & m_c[None, :]
    o_x = o_t[:, None] * C + o_c[None, :]
    b_acc += tl.load(p_b + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_acc += tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_next = tl.load(p_next + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    tl.store(p_sum + o_x, (b_acc + b_next).to(p_sum.dtype.element_ty), mask=m_x)
    b_norm, _ = normalise(b_acc.to(p_sum.dtype.element_ty).to(tl.float32), m_c, eps, C)
    b_gamma = tl.load(p_gamma + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    b_beta = tl.load(p_beta + o_c, mask=m_c, other=0.0).to(tl.float32)[None, :]
    tl.store(p_norm + o_x, (b_norm * b_gamma + b_beta).to(p_norm.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["tokens"])
def whole_mlp(
    p_n, p_w1, p_b1, p_w2, p_x, p_out, tokens,
    C: tl.constexpr, HIDDEN: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """The sum x + W2 gelu(W1 n + b1), with the hidden layer in registers, BLOCK_H channels of it at a time."""
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    m_x = (o_t < tokens)[:, None] & m_c[None, :]
    o_x = o_t[:, None] * C + o_c[None, :]
    b_n = tl.load(p_n + o_x, mask=m_x, other=0.0)
    b_acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    o_h = tl.arange(0, BLOCK_H)
    p_w1t = p_w1 + o_h[None, :] * C + o_c[:, None]
    p_w2t = p_w2 + o_c[None, :] * HIDDEN + o_h[:, None]
    for k in tl.range(0, HIDDEN, BLOCK_H):
        b_w1 = tl.load(p_w1t + k * C, mask=m_c[:, None], other=0.0)
        b_w2 = tl.load(p_w2t + k, mask=m_c[None, :], other=0.0)
        b_b1 = tl.load(p_b1 + k + o_h).to(tl.float32)
        b_h = tl.dot(b_n, b_w1, input_precision="ieee") + b_b1[None, :]
        b_a, _ = gelu(b_h)
        b_acc = tl.dot(b_a.to(b_w2.dtype), b_w2, b_acc, input_precision="ieee")
    b_acc += tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(p_out + o_x, b_acc.to(p_out.dtype.element_ty), mask=m_x)


@triton.jit
def choose(z, p_0, p_1, p_2):
    """The pointer of this third of a grid."""
    return tl.where(z == 0, p_0, tl.where(z == 1, p_1, p_2))


@triton.jit(do_not_specialize=["tokens"])
def linear(
    p_x, p_w0, p_w1, p_w2, p_b0, p_b1, p_b2, p_y0, p_y1, p_y2, tokens,
    C: tl.constexpr, N: tl.constexpr, GELU: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The product x W^T + b, or its GELU; on a grid of three planes, three of them, of (3, tokens, c).

    BLOCK_K divides c.
    """
    n_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(0)
    z = tl.program_id(1)
    o_t = (pid // n_n).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_n = pid % n_n * BLOCK_N + tl.arange(0, BLOCK_N)
    m_t = o_t < tokens
    m_n = o_n < N
    o_k = tl.arange(0, BLOCK_K)
    p_x += z * (tokens.to(tl.int64) * C)
    p_w = choose(z, p_w0, p_w1, p_w2)
    p_b = choose(z, p_b0, p_b1, p_b2)
    p_y = choose(z, p_y0, p_y1, p_y2)
    p_xt = p_x + o_t[:, None] * C + o_k[None, :]
    p_wt = p_w + o_n[None, :] * C + o_k[:, None]
    b_acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for k in tl.range(0, C, BLOCK_K):
        b_x = tl.load(p_xt + k, mask=m_t[:, None], other=0.0)
        b_w = tl.load(p_wt + k, mask=m_n[None, :], other=0.0)
        b_acc = tl.dot(b_x, b_w, b_acc, input_precision="ieee")
    b_acc += tl.load(p_b + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    m_y = m_t[:, None] & m_n[None, :]
    o_y = o_t[:, None] * N + o_n[None, :]
    if GELU:
        b_acc, _ = gelu(b_acc)
    tl.store(p_y + o_y, b_acc.to(p_y.dtype.element_ty), mask=m_y)
