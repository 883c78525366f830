"""Kernels of a block, without attention and convolutions: norms, residuals, GELU, matrix products, sums.

All maps are (b, h, w, c), contiguous; sums are in float32 for every dtype of the tensors. Sizes are plain run-time
numbers, never specialised, so that one compilation serves all map sizes. Sums over all tokens are written as one
partial result per program, and `sum_rows` adds these: no atomics, so the result is deterministic.
"""

import torch
import triton
import triton.language as tl

from ..launching import INTERPRETED
from ..prologue import begin

# tanh as one instruction, on NVIDIA GPUs.
PTX = tl.constexpr(not INTERPRETED and torch.version.hip is None)


@triton.jit
def choose(z, p_0, p_1, p_2):
    """Return the pointer for the plane of the grid that this program is in."""
    return tl.where(z == 0, p_0, tl.where(z == 1, p_1, p_2))


@triton.jit
def normalise(b_x, m_c, eps, C: tl.constexpr):
    """Return the rows of `b_x`, (tokens, BLOCK_C), with mean 0 and variance 1, and reciprocal standard deviations."""
    b_mean = tl.sum(b_x, 1) / C
    b_x = tl.where(m_c[None, :], b_x - b_mean[:, None], 0.0)
    b_r = tl.math.rsqrt(tl.sum(b_x * b_x, 1) / C + eps)
    return b_x * b_r[:, None], b_r


@triton.jit
def load_scale(p_scale, o_t, m_t, per_image):
    """Load the value of each token's image, (BLOCK_T, 1)."""
    return tl.load(p_scale + o_t // per_image, mask=m_t, other=0.0).to(tl.float32)[:, None]


@triton.jit(do_not_specialize=["tokens", "per_image"])
def add_norm(
    p_x, p_y, p_bias, p_scale, p_next, p_next_scale, p_gamma, p_beta, p_sum, p_base, p_norm, tokens, per_image, eps,
    ADD: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, NEXT_SCALE: tl.constexpr, SUM: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute the sum x + scale (y + bias) and its LayerNorm; `scale` is one number per image.

    Without y: LayerNorm(x + bias). `base` is the sum plus the bias of the next layer times its own scale.
    """
    begin()
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    m_t = o_t < tokens
    m_x = m_t[:, None] & m_c[None, :]
    o_x = o_t[:, None] * C + o_c[None, :]
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    if BIAS:
        b_bias = tl.load(p_bias + o_c[None, :], mask=m_c[None, :], other=0.0).to(tl.float32)
        if not ADD:
            b_x += b_bias
    if ADD:
        b_y = tl.load(p_y + o_x, mask=m_x, other=0.0).to(tl.float32)
        if BIAS:
            b_y += b_bias
        if SCALE:
            b_y *= load_scale(p_scale, o_t, m_t, per_image)
        b_x = (b_x + b_y).to(p_base.dtype.element_ty).to(tl.float32)
        if SUM:
            tl.store(p_sum + o_x, b_x.to(p_sum.dtype.element_ty), mask=m_x)
        b_next = tl.load(p_next + o_c[None, :], mask=m_c[None, :], other=0.0).to(tl.float32)
        if NEXT_SCALE:
            b_next = b_next * load_scale(p_next_scale, o_t, m_t, per_image)
        tl.store(p_base + o_x, (b_x + b_next).to(p_base.dtype.element_ty), mask=m_x)
    b_norm, _ = normalise(b_x, m_c, eps, C)
    b_gamma = tl.load(p_gamma + o_c[None, :], mask=m_c[None, :], other=0.0).to(tl.float32)
    b_beta = tl.load(p_beta + o_c[None, :], mask=m_c[None, :], other=0.0).to(tl.float32)
    tl.store(p_norm + o_x, (b_norm * b_gamma + b_beta).to(p_norm.dtype.element_ty), mask=m_x)


@triton.jit
def load_gradients_of_norm(
    p_x, p_g, p_gx, o_t, tokens, o_c, m_c, ADD: tl.constexpr, C: tl.constexpr
):
    """Load a block of x and of the two gradients."""
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
    p_g, p_gx, p_x, p_bias, p_gamma, p_scale, p_next_scale, p_dx, p_dy, p_sums, tokens, per_image, each, eps,
    ADD: tl.constexpr, BIAS: tl.constexpr, SCALE: tl.constexpr, NEXT: tl.constexpr, NEXT_SCALE: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of x from those of x and LayerNorm(x), and partial sums, (programs, 3 or 4, c).

    The sums are over `each` blocks of tokens. With a bias, x is the map plus the bias. With a scale per image, x is a
    sum that contains scale * y, and the gradient of y is computed too. The sums are the gradients of gamma and beta, of
    a bias in x or in y, and (NEXT) of a bias that is added to x later, times its own scale.
    """
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    b_gamma = tl.load(p_gamma + o_c[None, :], mask=m_c[None, :], other=0.0).to(tl.float32)
    if BIAS:
        b_bias = tl.load(p_bias + o_c[None, :], mask=m_c[None, :], other=0.0).to(tl.float32)
    b_dgamma = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    b_dbeta = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    b_total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    b_dnext = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    first = tl.program_id(0).to(tl.int64) * each * BLOCK_T
    o_t = first + tl.arange(0, BLOCK_T)
    n_x, n_g, n_gx = load_gradients_of_norm(p_x, p_g, p_gx, o_t, tokens, o_c, m_c, ADD, C)
    for _ in range(0, each):
        b_x, b_g, b_gx = n_x.to(tl.float32), n_g.to(tl.float32), n_gx.to(tl.float32)
        m_t = o_t < tokens
        m_x = m_t[:, None] & m_c[None, :]
        o_x = o_t[:, None] * C + o_c[None, :]
        o_s = o_t
        o_t += BLOCK_T
        n_x, n_g, n_gx = load_gradients_of_norm(p_x, p_g, p_gx, o_t, tokens, o_c, m_c, ADD, C)
        if BIAS:
            b_x += b_bias
        if NEXT_SCALE:
            b_dnext += b_gx * load_scale(p_next_scale, o_s, m_t, per_image)
        elif NEXT:
            b_dnext += b_gx
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
            b_dx *= load_scale(p_scale, o_s, m_t, per_image)
            tl.store(p_dy + o_x, b_dx.to(p_dy.dtype.element_ty), mask=m_x)
        b_total += b_dx
    p_sums += tl.program_id(0) * ((4 if NEXT else 3) * C) + o_c
    tl.store(p_sums, tl.sum(b_dgamma, 0), mask=m_c)
    tl.store(p_sums + C, tl.sum(b_dbeta, 0), mask=m_c)
    tl.store(p_sums + 2 * C, tl.sum(b_total, 0), mask=m_c)
    if NEXT:
        tl.store(p_sums + 3 * C, tl.sum(b_dnext, 0), mask=m_c)


@triton.jit
def gelu(b_x):
    """Return x Phi(x) and 1 - Phi(|x|); Phi is the normal distribution function.

    Its tail follows Abramowitz and Stegun 7.1.26, with an error of 1.5e-7 and half the instructions of the library's
    erf.
    """
    b_t = 1.0 / (1.0 + 0.23164190 * tl.abs(b_x))
    b_p = 0.5307027145 * b_t - 0.7265760135
    b_p = b_p * b_t + 0.7107068705
    b_p = b_p * b_t - 0.142248368
    b_p = b_p * b_t + 0.127414796
    b_tail = b_p * b_t * tl.math.exp2(b_x * b_x * -0.7213475204444817)
    return tl.maximum(b_x, 0.0) - tl.abs(b_x) * b_tail, b_tail


@triton.jit
def quick_gelu(b_x):
    """Return GELU for 16-bit results: x Phi(x), Phi(x) = (1 + tanh q(x)) / 2, error at most |x| 2^-12 + 2.5e-5.

    It needs one instruction of the slow special function unit, not two, and half of the others.
    """
    b_u = tl.minimum(b_x * b_x, 36.0)
    b_q = b_x * (0.797507880 + b_u * (0.0370056514 - 0.000351518616 * b_u))
    if PTX:
        b_t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [b_q], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        b_t = 1.0 - 2.0 / (1.0 + tl.exp(2.0 * b_q))
    return 0.5 * b_x * (1.0 + b_t)


@triton.jit
def gelu_for(b_x, QUICK: tl.constexpr):
    """Return GELU; QUICK: by the approximation for 16-bit results."""
    if QUICK:
        b_a = quick_gelu(b_x)
    else:
        b_a, _ = gelu(b_x)
    return b_a


@triton.jit
def gelu_gradient(b_h):
    """Return GELU of h, and its derivative."""
    b_a, b_tail = gelu(b_h)
    b_phi = tl.where(b_h > 0, 1.0 - b_tail, b_tail)
    b_density = 0.3989422804014327 * tl.math.exp2(b_h * b_h * -0.7213475204444817)
    return b_a, b_phi + b_h * b_density


@triton.jit(do_not_specialize=["tokens", "per_image"])
def gelu_forward(
    p_h, p_scale, p_a, tokens, per_image,
    SCALE: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute GELU(h), times one number per image."""
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_t = o_t < tokens
    m_x = m_t[:, None] & (o_c < C)[None, :]
    o_x = o_t[:, None] * C + o_c[None, :]
    b_a, _ = gelu(tl.load(p_h + o_x, mask=m_x, other=0.0).to(tl.float32))
    if SCALE:
        b_a *= load_scale(p_scale, o_t, m_t, per_image)
    tl.store(p_a + o_x, b_a.to(p_a.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["tokens", "per_image", "each"])
def gelu_backward(
    p_h, p_scale, p_g, p_a, p_dh, p_sums, tokens, per_image, each,
    SCALE: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute scaled GELU(h) again, the gradient of h, and its sums over `each` blocks of tokens, (programs, c)."""
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    m_c = o_c < C
    b_total = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    first = tl.program_id(0).to(tl.int64) * each * BLOCK_T
    for block in range(0, each):
        o_t = first + block * BLOCK_T + tl.arange(0, BLOCK_T)
        m_t = o_t < tokens
        m_x = m_t[:, None] & m_c[None, :]
        o_x = o_t[:, None] * C + o_c[None, :]
        b_h = tl.load(p_h + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_g = tl.load(p_g + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_a, b_slope = gelu_gradient(b_h)
        b_dh = b_g * b_slope
        if SCALE:
            b_scale = load_scale(p_scale, o_t, m_t, per_image)
            b_a *= b_scale
            b_dh *= b_scale
        b_total += b_dh
        tl.store(p_a + o_x, b_a.to(p_a.dtype.element_ty), mask=m_x)
        tl.store(p_dh + o_x, b_dh.to(p_dh.dtype.element_ty), mask=m_x)
    tl.store(p_sums + tl.program_id(0) * C + o_c, tl.sum(b_total, 0), mask=m_c)


@triton.jit(do_not_specialize=["rows", "columns_16", "each"])
def sum_rows(
    p_x0, p_x1, p_x2, p_sums, rows, columns_16, each,
    TAPS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute column sums of (rows, 16 columns_16), `each` rows per program: (programs, matrices, 16 columns_16).

    A grid of three planes sums three matrices. TAPS: number of channels c if the columns are (convolutions, 9, c);
    the sums are then written as (convolutions, c, 9), the layout of PyTorch's weights.
    """
    columns = columns_16 * 16
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    z = tl.program_id(2)
    p_x = choose(z, p_x0, p_x1, p_x2)
    first = tl.program_id(0).to(tl.int64) * each
    b_sum = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for row in range(0, each, BLOCK_R):
        o_r = row + tl.arange(0, BLOCK_R)
        m_x = ((o_r < each) & (first + o_r < rows))[:, None] & (o_c < columns)[None, :]
        p = p_x + (first + o_r)[:, None] * columns + o_c[None, :]
        b_sum += tl.load(p, mask=m_x, other=0.0).to(tl.float32)
    o_y = o_c
    if TAPS:
        o_y = (o_c // (9 * TAPS) * TAPS + o_c % TAPS) * 9 + o_c // TAPS % 9
    p_sums += (tl.program_id(0).to(tl.int64) * tl.num_programs(2) + z) * columns
    tl.store(p_sums + o_y, tl.sum(b_sum, 0).to(p_sums.dtype.element_ty), mask=o_c < columns)


@triton.jit
def choose_six(z, x_0, x_1, x_2, x_3, x_4, x_5):
    """Return the pointer or number with index `z`."""
    low = tl.where(z == 0, x_0, tl.where(z == 1, x_1, x_2))
    return tl.where(z < 3, low, tl.where(z == 3, x_3, tl.where(z == 4, x_4, x_5)))


@triton.jit(do_not_specialize=["rows_0", "rows_1", "rows_2", "rows_3", "rows_4", "rows_5"])
def sum_parts(
    p_x0, p_x1, p_x2, p_x3, p_x4, p_x5, p_sums, rows_0, rows_1, rows_2, rows_3, rows_4, rows_5,
    N: tl.constexpr, C: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Compute the column sums of the six partial results of a block's backward, one after the other.

    Their columns are n, 4 c, 3 c, 27 c, 3 c and 9 c, multiples of BLOCK_C. The fourth and the last are (convolutions,
    9, c), whose sums are written as (convolutions, c, 9). A program has BLOCK_C columns, added in the order of
    `sum_rows`; a smaller grid leaves out the last matrix.
    """
    first_1: tl.constexpr = N
    first_2: tl.constexpr = N + 4 * C
    first_3: tl.constexpr = N + 7 * C
    first_4: tl.constexpr = N + 34 * C
    first_5: tl.constexpr = N + 37 * C
    o = tl.program_id(0) * BLOCK_C
    z = (o >= first_1).to(tl.int32) + (o >= first_2).to(tl.int32) + (o >= first_3).to(tl.int32)
    z += (o >= first_4).to(tl.int32) + (o >= first_5).to(tl.int32)
    start = choose_six(z, 0, first_1, first_2, first_3, first_4, first_5)
    columns = choose_six(z, N, 4 * C, 3 * C, 27 * C, 3 * C, 9 * C)
    rows = choose_six(z, rows_0, rows_1, rows_2, rows_3, rows_4, rows_5)
    p_x = choose_six(z, p_x0, p_x1, p_x2, p_x3, p_x4, p_x5)
    o_c = o - start + tl.arange(0, BLOCK_C)
    b_sum = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
    for row in range(0, rows, BLOCK_R):
        o_r = row + tl.arange(0, BLOCK_R)
        p = p_x + o_r.to(tl.int64)[:, None] * columns + o_c[None, :]
        b_sum += tl.load(p, mask=(o_r < rows)[:, None], other=0.0)
    o_t = (o_c // (9 * C) * C + o_c % C) * 9 + o_c // C % 9
    o_y = tl.where((z == 3) | (z == 5), o_t, o_c)
    tl.store(p_sums + start + o_y, tl.sum(b_sum, 0))


@triton.jit
def load_vectors(p_0, p_1, p_2, p_3, o_c, m_c):
    """Load one value per channel from four tensors."""
    b_0 = tl.load(p_0 + o_c[None, :], mask=m_c[None, :], other=0.0).to(tl.float32)
    b_1 = tl.load(p_1 + o_c[None, :], mask=m_c[None, :], other=0.0).to(tl.float32)
    b_2 = tl.load(p_2 + o_c[None, :], mask=m_c[None, :], other=0.0).to(tl.float32)
    b_3 = tl.load(p_3 + o_c[None, :], mask=m_c[None, :], other=0.0).to(tl.float32)
    return b_0, b_1, b_2, b_3


@triton.jit(do_not_specialize=["tokens"])
def linear_norm(
    p_y, p_w, p_b, p_x, p_next, p_gamma, p_beta, p_sum, p_norm, tokens, eps,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute x + y W^T + b and its LayerNorm; `w` is (c, c), BLOCK_K divides c, a program has whole rows.

    `next` is the bias of the next layer: it is added to the stored sum, after the norm is computed.
    """
    begin()
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < tokens
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    o_k = tl.arange(0, BLOCK_K)
    p_yt = p_y + o_t[:, None] * C + o_k[None, :]
    p_wt = p_w + o_c[None, :] * C + o_k[:, None]
    m_x = m_t[:, None] & m_c[None, :]
    o_x = o_t[:, None] * C + o_c[None, :]
    # With few tokens per program, registers suffice to load the other operands before the product is done.
    early: tl.constexpr = BLOCK_T <= 16
    if early:
        b_x = tl.load(p_x + o_x, mask=m_x, other=0.0)
        b_b, b_next, b_gamma, b_beta = load_vectors(p_b, p_next, p_gamma, p_beta, o_c, m_c)
    b_acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for k in tl.range(0, C, BLOCK_K):
        b_y = tl.load(p_yt + k, mask=m_t[:, None], other=0.0)
        b_w = tl.load(p_wt + k, mask=m_c[None, :], other=0.0)
        b_acc = tl.dot(b_y, b_w, b_acc, input_precision="ieee")
    if not early:
        b_x = tl.load(p_x + o_x, mask=m_x, other=0.0)
        b_b, b_next, b_gamma, b_beta = load_vectors(p_b, p_next, p_gamma, p_beta, o_c, m_c)
    b_acc += b_b + b_x.to(tl.float32)
    tl.store(p_sum + o_x, (b_acc + b_next).to(p_sum.dtype.element_ty), mask=m_x)
    b_norm, _ = normalise(b_acc.to(p_sum.dtype.element_ty).to(tl.float32), m_c, eps, C)
    tl.store(p_norm + o_x, (b_norm * b_gamma + b_beta).to(p_norm.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["tokens"])
def whole_mlp(
    p_n, p_w1, p_b1, p_w2, p_x, p_out, tokens,
    QUICK: tl.constexpr, C: tl.constexpr, HIDDEN: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Compute x + W2 gelu(W1 n + b1), with BLOCK_H channels of the hidden layer in registers at a time."""
    begin()
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
        b_a = gelu_for(b_h, QUICK)
        b_acc = tl.dot(b_a.to(b_w2.dtype), b_w2, b_acc, input_precision="ieee")
    b_acc += tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(p_out + o_x, b_acc.to(p_out.dtype.element_ty), mask=m_x)


@triton.jit(do_not_specialize=["tokens", "per_image"])
def linear(
    p_x, p_w0, p_w1, p_w2, p_b0, p_b1, p_b2, p_y0, p_y1, p_y2, p_a, p_scale, tokens, per_image,
    C: tl.constexpr, N: tl.constexpr,
    GELU: tl.constexpr, BOTH: tl.constexpr, SCALE: tl.constexpr, QUICK: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute x W^T + b, or its GELU, or both; on a grid of three planes, three of them from (3, tokens, c).

    If both are stored, the GELU times one number per image is written to `a`. BLOCK_K divides c.
    """
    begin()
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
    b_b = tl.load(p_b + o_n[None, :], mask=m_n[None, :], other=0.0).to(tl.float32)
    b_acc = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
    for k in tl.range(0, C, BLOCK_K):
        b_x = tl.load(p_xt + k, mask=m_t[:, None], other=0.0)
        b_w = tl.load(p_wt + k, mask=m_n[None, :], other=0.0)
        b_acc = tl.dot(b_x, b_w, b_acc, input_precision="ieee")
    m_y = m_t[:, None] & m_n[None, :]
    o_y = o_t[:, None] * N + o_n[None, :]
    b_acc += b_b
    if GELU:
        b_acc = gelu_for(b_acc, QUICK)
    b_y = b_acc.to(p_y.dtype.element_ty)
    tl.store(p_y + o_y, b_y, mask=m_y)
    if BOTH:
        b_a, _ = gelu(b_y.to(tl.float32))
        if SCALE:
            b_a *= load_scale(p_scale, o_t, m_t, per_image)
        tl.store(p_a + o_y, b_a.to(p_a.dtype.element_ty), mask=m_y)


@triton.jit(do_not_specialize=["tokens", "h", "w", "rows", "columns", "x_b", "x_c", "x_h", "x_w"])
def stem(
    p_x, p_w, p_b, p_gamma, p_beta, p_norm, tokens, h, w, rows, columns, x_b, x_c, x_h, x_w, eps,
    KERNEL: tl.constexpr, STRIDE: tl.constexpr, CHANNELS: tl.constexpr, SPAN: tl.constexpr,
    C: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute LayerNorm of a convolution of images, (b, CHANNELS, h, w) of any strides: (b, rows, columns, c).

    One matrix product for each row of the window, of SPAN >= KERNEL * CHANNELS values, padded with zeros;
    weights are (KERNEL, SPAN, c). The image is padded with zeros.
    """
    begin()
    o_t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    m_t = o_t < tokens
    image = o_t // (rows * columns)
    i = o_t // columns % rows * STRIDE - KERNEL // 2
    j = o_t % columns * STRIDE - KERNEL // 2
    o_c = tl.arange(0, BLOCK_C)
    m_c = o_c < C
    o_k = tl.arange(0, SPAN)
    column = j[:, None] + (o_k // CHANNELS)[None, :]
    m_x = (m_t[:, None] & (column >= 0)) & ((column < w) & (o_k < KERNEL * CHANNELS)[None, :])
    o_x = (image.to(tl.int64) * x_b)[:, None] + column * x_w + (o_k % CHANNELS * x_c)[None, :]
    b_acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for r in tl.static_range(KERNEL):
        row = i + r
        inside = ((row >= 0) & (row < h))[:, None]
        b_x = tl.load(p_x + o_x + (row * x_h)[:, None], mask=m_x & inside, other=0.0)
        p_r = p_w + (r * SPAN + o_k)[:, None] * C + o_c[None, :]
        b_w = tl.load(p_r, mask=m_c[None, :], other=0.0)
        b_acc = tl.dot(b_x, b_w, b_acc, input_precision="ieee")
    b_acc += tl.load(p_b + o_c[None, :], mask=m_c[None, :], other=0.0).to(tl.float32)
    b_norm, _ = normalise(b_acc, m_c, eps, C)
    b_gamma = tl.load(p_gamma + o_c[None, :], mask=m_c[None, :], other=0.0).to(tl.float32)
    b_beta = tl.load(p_beta + o_c[None, :], mask=m_c[None, :], other=0.0).to(tl.float32)
    p = p_norm + o_t.to(tl.int64)[:, None] * C + o_c[None, :]
    b_norm = (b_norm * b_gamma + b_beta).to(p_norm.dtype.element_ty)
    tl.store(p, b_norm, mask=m_t[:, None] & m_c[None, :])
