"""Kernels of pale attention. They read q, k, v in place and write the output in the layout of the next layer.

README.md has the index map and the derivation of the backward. Sizes and strides are plain run-time numbers, never
specialised, so that one compilation serves all map sizes; strides are in units of 16 bytes (`ALIGN` elements).
Tokens past the end of a group are loaded from its last token instead, which needs no mask, and then excluded.
"""

import triton
import triton.language as tl

from ..prologue import begin

LINES = [
    f"{x}_{name}" for x in ("r", "c") for name in ("n", "first", "step", "many", "big", "small")
]
STRIDES = [f"{x}_{axis}" for x in ("q", "k", "v", "g") for axis in ("b", "h", "w", "n")]
RUN_TIME = ["h", "w", "heads", "split", "per", *LINES, *STRIDES]


@triton.jit
def segment(p, column, h, w, rows, columns):
    """Describe row group or column group `p`: its number of tokens, that of all groups before it, and token positions.

    Token t is in line t // inner of the group, at row i_0 + (t // inner) i_step, column j_0 + (t % inner) j_step.
    """
    n = tl.where(column, columns[0], rows[0])
    step = tl.where(column, columns[2], rows[2])
    many = tl.where(column, columns[3], rows[3])
    big = tl.where(column, columns[4], rows[4])
    small = tl.where(column, columns[5], rows[5])
    size = tl.where(p < n, tl.where(p < many, big, small), 0)
    # An empty group is token 0 of the map, which can be loaded and is then excluded.
    first = tl.where(size > 0, p * tl.where(column, columns[1], rows[1]), 0)
    before = p * big - tl.maximum(p - many, 0) * (big - small)
    width = tl.where(column, h, w)
    inner = tl.where(column, tl.maximum(size, 1), w)
    i_0 = tl.where(column, 0, first)
    i_step = tl.where(column, 1, step)
    j_0 = tl.where(column, first, 0)
    j_step = tl.where(column, step, 1)
    return size * width, before * width, (inner, i_0, i_step, j_0, j_step)


@triton.jit
def divide(t, by):
    """Return t // by in four instructions instead of a division; exact for t < 2^22."""
    return ((t.to(tl.float32) + 0.5) * (1.0 / by)).to(tl.int32)


@triton.jit
def offsets(t, line, seg, s_h, s_w):
    """Return the offsets of tokens `t`, which are in `line`, in a tensor with these row and column strides."""
    inner, i_0, i_step, j_0, j_step = seg
    return i_0 * s_h + j_0 * s_w + t * (j_step * s_w) + line * (i_step * s_h - inner * j_step * s_w)


@triton.jit
def load_rows(p_x, o_t, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load one row of D values per token, with zeros up to BLOCK_D."""
    o_d = tl.arange(0, BLOCK_D)
    if D == BLOCK_D:
        b_x = tl.load(p_x + o_t[:, None] + o_d[None, :])
    else:
        b_x = tl.load(p_x + o_t[:, None] + o_d[None, :], mask=o_d[None, :] < D, other=0.0)
    return b_x


@triton.jit
def store_rows(p_x, o_t, m_t, b_x, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Store one row of D values for each token that exists."""
    o_d = tl.arange(0, BLOCK_D)
    m_x = m_t[:, None] & (o_d[None, :] < D)
    tl.store(p_x + o_t[:, None] + o_d[None, :], b_x.to(p_x.dtype.element_ty), mask=m_x)


@triton.jit
def place(o_t, tokens, seg):
    """Return the tokens at the positions `o_t` of a segment, their lines, and which of them exist."""
    t = tl.maximum(tl.minimum(o_t, tokens - 1), 0)
    return t, divide(t, seg[0]), o_t < tokens


@triton.jit
def not_crossing(line, p, column, rows):
    """Return which keys of column group `p` are not in row group `p` too; keys of row groups always count."""
    group = divide(line, rows[1])
    group -= divide(group, rows[0]) * rows[0]
    return (column & (group == p)) == 0


@triton.jit
def attend(b_acc, b_max, b_sum, b_q, b_k, b_v, m_n, SCALE: tl.constexpr, MASK: tl.constexpr):
    """Compute one step of the online softmax."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if MASK:
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_s, 1) * SCALE)
    # Queries without a key so far keep -inf; the zero avoids inf - inf.
    b_safe = tl.where(b_new == float("-inf"), 0.0, b_new) if MASK else b_new
    b_p = tl.math.exp2(b_s * SCALE - b_safe[:, None])
    b_alpha = tl.math.exp2(b_max - b_safe)
    b_sum = b_sum * b_alpha + tl.sum(b_p, 1)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_alpha[:, None], input_precision="ieee")
    return b_acc, b_new, b_sum


@triton.jit(do_not_specialize=RUN_TIME)
def attention_forward(
    p_q, p_k, p_v, p_out, p_lse, h, w, heads, split, per,
    r_n, r_first, r_step, r_many, r_big, r_small, c_n, c_first, c_step, c_many, c_big, c_small,
    q_b, q_h, q_w, q_n, k_b, k_h, k_w, k_n, v_b, v_h, v_w, v_n,
    PALE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute the output and log2 of each query's sum of exponentials, (b, heads, h*w) in the order of groups.

    The kernel loops over blocks of keys; the last BLOCK_T or fewer keys are loaded first, which hides their latency.
    """
    begin()
    b = tl.program_id(2).to(tl.int64)
    p = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    column = head >= split
    rows = (r_n, r_first, r_step, r_many, r_big, r_small)
    columns = (c_n, c_first, c_step, c_many, c_big, c_small)
    tokens, before, seg = segment(p, column, h, w, rows, columns)
    start = tl.program_id(0) * BLOCK_M
    if start >= tokens:
        return
    p_q += (b * q_b + head * q_n) * ALIGN
    p_k += (b * k_b + head * k_n) * ALIGN
    p_v += (b * v_b + head * v_n) * ALIGN
    o_m = start + tl.arange(0, BLOCK_M)
    t_m, line_m, m_m = place(o_m, tokens, seg)
    b_q = load_rows(p_q, offsets(t_m, line_m, seg, q_h * ALIGN, q_w * ALIGN), D, BLOCK_D)
    b_acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    b_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    b_sum = tl.zeros([BLOCK_M], tl.float32)
    if PALE:
        for part in tl.static_range(2):
            by_column = p >= 0 if part == 1 else p < 0
            n_tokens, _, n_seg = segment(p, by_column, h, w, rows, columns)
            for n in tl.range(0, n_tokens, BLOCK_N):
                t, line, m_n = place(n + tl.arange(0, BLOCK_N), n_tokens, n_seg)
                m_n = m_n & not_crossing(line, p, by_column, rows)
                b_k = load_rows(p_k, offsets(t, line, n_seg, k_h * ALIGN, k_w * ALIGN), D, BLOCK_D)
                b_v = load_rows(p_v, offsets(t, line, n_seg, v_h * ALIGN, v_w * ALIGN), D, BLOCK_D)
                b_acc, b_max, b_sum = attend(b_acc, b_max, b_sum, b_q, b_k, b_v, m_n, SCALE, True)
    else:
        full = tokens // BLOCK_N * BLOCK_N
        t_t, line_t, m_t = place(full + tl.arange(0, BLOCK_T), tokens, seg)
        b_kt = load_rows(p_k, offsets(t_t, line_t, seg, k_h * ALIGN, k_w * ALIGN), D, BLOCK_D)
        b_vt = load_rows(p_v, offsets(t_t, line_t, seg, v_h * ALIGN, v_w * ALIGN), D, BLOCK_D)
        for n in tl.range(0, full, BLOCK_N):
            t = n + tl.arange(0, BLOCK_N)
            line = divide(t, seg[0])
            b_k = load_rows(p_k, offsets(t, line, seg, k_h * ALIGN, k_w * ALIGN), D, BLOCK_D)
            b_v = load_rows(p_v, offsets(t, line, seg, v_h * ALIGN, v_w * ALIGN), D, BLOCK_D)
            b_acc, b_max, b_sum = attend(b_acc, b_max, b_sum, b_q, b_k, b_v, m_t, SCALE, False)
        if full < tokens:
            b_acc, b_max, b_sum = attend(b_acc, b_max, b_sum, b_q, b_kt, b_vt, m_t, SCALE, True)
    p_out += b * (h * w * heads * D) + head * D
    p_lse += (b * heads + head) * (h * w) + before
    o_out = offsets(t_m, line_m, seg, w * heads * D, heads * D)
    store_rows(p_out, o_out, m_m, b_acc / b_sum[:, None], D, BLOCK_D)
    tl.store(p_lse + o_m, b_max + tl.math.log2(b_sum), mask=m_m)


@triton.jit(do_not_specialize=RUN_TIME)
def attention_forward_group(
    p_q, p_k, p_v, p_out, p_lse, h, w, heads, split, per,
    r_n, r_first, r_step, r_many, r_big, r_small, c_n, c_first, c_step, c_many, c_big, c_small,
    q_b, q_h, q_w, q_n, k_b, k_h, k_w, k_n, v_b, v_h, v_w, v_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute `attention_forward` for groups of up to BLOCK_N tokens: one step of keys, and `per` heads in sequence."""
    begin()
    b = tl.program_id(2).to(tl.int64)
    p = tl.program_id(1) // (heads // per)
    first = tl.program_id(1) % (heads // per) * per
    rows = (r_n, r_first, r_step, r_many, r_big, r_small)
    columns = (c_n, c_first, c_step, c_many, c_big, c_small)
    tokens, before, seg = segment(p, first >= split, h, w, rows, columns)
    start = tl.program_id(0) * BLOCK_M
    if start >= tokens:
        return
    o_m = start + tl.arange(0, BLOCK_M)
    t_m, line_m, m_m = place(o_m, tokens, seg)
    t_n, line_n, m_n = place(tl.arange(0, BLOCK_N), tokens, seg)
    o_q = offsets(t_m, line_m, seg, q_h * ALIGN, q_w * ALIGN)
    o_k = offsets(t_n, line_n, seg, k_h * ALIGN, k_w * ALIGN)
    o_v = offsets(t_n, line_n, seg, v_h * ALIGN, v_w * ALIGN)
    o_out = offsets(t_m, line_m, seg, w * heads * D, heads * D)
    p_q += b * q_b * ALIGN
    p_k += b * k_b * ALIGN
    p_v += b * v_b * ALIGN
    p_out += b * (h * w * heads * D)
    p_lse += b * heads * (h * w) + before
    for head in tl.range(first, first + per):
        b_q = load_rows(p_q + head * q_n * ALIGN, o_q, D, BLOCK_D)
        b_k = load_rows(p_k + head * k_n * ALIGN, o_k, D, BLOCK_D)
        b_v = load_rows(p_v + head * v_n * ALIGN, o_v, D, BLOCK_D)
        b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
        b_s = tl.where(m_n[None, :], b_s, float("-inf"))
        b_max = tl.max(b_s, 1) * SCALE
        b_p = tl.math.exp2(b_s * SCALE - b_max[:, None])
        b_sum = tl.sum(b_p, 1)
        b_out = tl.dot(b_p.to(b_v.dtype), b_v, input_precision="ieee") / b_sum[:, None]
        store_rows(p_out + head * D, o_out, m_m, b_out, D, BLOCK_D)
        tl.store(p_lse + head * (h * w) + o_m, b_max + tl.math.log2(b_sum), mask=m_m)


@triton.jit
def query_gradient(
    b_dq, b_q, b_g, b_lse, b_delta, b_k, b_v, m_n, SCALE: tl.constexpr, MASK: tl.constexpr
):
    """Add one block of keys to dq, (BLOCK_M, BLOCK_D), without the factor d^-0.5."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    b_p = tl.math.exp2(b_s * SCALE - b_lse[:, None])
    if MASK:
        b_p = tl.where(m_n[None, :], b_p, 0.0)
    b_dp = tl.dot(b_g, tl.trans(b_v), input_precision="ieee")
    b_ds = b_p * (b_dp - b_delta[:, None])
    return tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision="ieee")


@triton.jit(do_not_specialize=RUN_TIME)
def attention_backward_q(
    p_g, p_q, p_k, p_v, p_out, p_lse, p_pair, p_dq, h, w, heads, split, per,
    r_n, r_first, r_step, r_many, r_big, r_small, c_n, c_first, c_step, c_many, c_big, c_small,
    g_b, g_h, g_w, g_n, q_b, q_h, q_w, q_n, k_b, k_h, k_w, k_n, v_b, v_h, v_w, v_n,
    PALE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the queries and, for the next kernel, (lse, delta = sum(g * out)) of each query."""
    b = tl.program_id(2).to(tl.int64)
    p = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    column = head >= split
    rows = (r_n, r_first, r_step, r_many, r_big, r_small)
    columns = (c_n, c_first, c_step, c_many, c_big, c_small)
    tokens, before, seg = segment(p, column, h, w, rows, columns)
    start = tl.program_id(0) * BLOCK_M
    if start >= tokens:
        return
    p_g += (b * g_b + head * g_n) * ALIGN
    p_q += (b * q_b + head * q_n) * ALIGN
    p_k += (b * k_b + head * k_n) * ALIGN
    p_v += (b * v_b + head * v_n) * ALIGN
    o_image = b * (h * w * heads * D) + head * D
    o_map = (b * heads + head) * (h * w) + before
    o_m = start + tl.arange(0, BLOCK_M)
    t_m, line_m, m_m = place(o_m, tokens, seg)
    o_out = offsets(t_m, line_m, seg, w * heads * D, heads * D)
    b_q = load_rows(p_q, offsets(t_m, line_m, seg, q_h * ALIGN, q_w * ALIGN), D, BLOCK_D)
    b_g = load_rows(p_g, offsets(t_m, line_m, seg, g_h * ALIGN, g_w * ALIGN), D, BLOCK_D)
    b_out = load_rows(p_out + o_image, o_out, D, BLOCK_D)
    b_lse = tl.load(p_lse + o_map + o_m, mask=m_m, other=0.0)
    b_dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    full = tokens // BLOCK_N * BLOCK_N
    t_t, line_t, m_t = place(full + tl.arange(0, BLOCK_T), tokens, seg)
    if not PALE:
        b_kt = load_rows(p_k, offsets(t_t, line_t, seg, k_h * ALIGN, k_w * ALIGN), D, BLOCK_D)
        b_vt = load_rows(p_v, offsets(t_t, line_t, seg, v_h * ALIGN, v_w * ALIGN), D, BLOCK_D)
    b_delta = tl.sum(b_g.to(tl.float32) * b_out.to(tl.float32), 1)
    p_pair += 2 * (o_map + o_m)
    tl.store(p_pair, b_lse, mask=m_m)
    tl.store(p_pair + 1, b_delta, mask=m_m)
    if PALE:
        for part in tl.static_range(2):
            by_column = p >= 0 if part == 1 else p < 0
            n_tokens, _, n_seg = segment(p, by_column, h, w, rows, columns)
            for n in tl.range(0, n_tokens, BLOCK_N):
                t, line, m_n = place(n + tl.arange(0, BLOCK_N), n_tokens, n_seg)
                m_n = m_n & not_crossing(line, p, by_column, rows)
                b_k = load_rows(p_k, offsets(t, line, n_seg, k_h * ALIGN, k_w * ALIGN), D, BLOCK_D)
                b_v = load_rows(p_v, offsets(t, line, n_seg, v_h * ALIGN, v_w * ALIGN), D, BLOCK_D)
                b_dq = query_gradient(b_dq, b_q, b_g, b_lse, b_delta, b_k, b_v, m_n, SCALE, True)
    else:
        for n in tl.range(0, full, BLOCK_N):
            t = n + tl.arange(0, BLOCK_N)
            line = divide(t, seg[0])
            b_k = load_rows(p_k, offsets(t, line, seg, k_h * ALIGN, k_w * ALIGN), D, BLOCK_D)
            b_v = load_rows(p_v, offsets(t, line, seg, v_h * ALIGN, v_w * ALIGN), D, BLOCK_D)
            b_dq = query_gradient(b_dq, b_q, b_g, b_lse, b_delta, b_k, b_v, m_t, SCALE, False)
        if full < tokens:
            b_dq = query_gradient(b_dq, b_q, b_g, b_lse, b_delta, b_kt, b_vt, m_t, SCALE, True)
    store_rows(p_dq + o_image, o_out, m_m, b_dq * (SCALE * 0.6931471805599453), D, BLOCK_D)


@triton.jit
def key_gradient(b_dk, b_dv, b_k, b_v, b_q, b_g, b_lse, b_delta, SCALE: tl.constexpr):
    """Add one block of queries to dk, without the factor d^-0.5, and to dv, both (BLOCK_N, BLOCK_D)."""
    b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")
    b_p = tl.math.exp2(b_s * SCALE - b_lse[None, :])
    b_dp = tl.zeros([b_k.shape[0], b_q.shape[0]], tl.float32) - b_delta[None, :]
    b_dp = tl.dot(b_v, tl.trans(b_g), b_dp, input_precision="ieee")
    b_dv = tl.dot(b_p.to(b_g.dtype), b_g, b_dv, input_precision="ieee")
    b_ds = b_p * b_dp
    b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision="ieee")
    return b_dk, b_dv


@triton.jit(do_not_specialize=RUN_TIME)
def attention_backward_kv(
    p_g, p_q, p_k, p_v, p_pair, p_dk, p_dv, h, w, heads, split, per,
    r_n, r_first, r_step, r_many, r_big, r_small, c_n, c_first, c_step, c_many, c_big, c_small,
    g_b, g_h, g_w, g_n, q_b, q_h, q_w, q_n, k_b, k_h, k_w, k_n, v_b, v_h, v_w, v_n,
    PALE: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of keys and values in a loop over queries; `PART` 0, 1: rows, columns of a pale as keys."""
    b = tl.program_id(2).to(tl.int64)
    p = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    column = head >= split
    rows = (r_n, r_first, r_step, r_many, r_big, r_small)
    columns = (c_n, c_first, c_step, c_many, c_big, c_small)
    by_column = (p >= 0 if PART == 1 else p < 0) if PALE else column
    n_tokens, _, n_seg = segment(p, by_column, h, w, rows, columns)
    start = tl.program_id(0) * BLOCK_N
    if start >= n_tokens:
        return
    tokens, before, seg = segment(p, column, h, w, rows, columns)
    p_g += (b * g_b + head * g_n) * ALIGN
    p_q += (b * q_b + head * q_n) * ALIGN
    p_k += (b * k_b + head * k_n) * ALIGN
    p_v += (b * v_b + head * v_n) * ALIGN
    p_pair += 2 * ((b * heads + head) * (h * w) + before)
    t_n, line_n, m_n = place(start + tl.arange(0, BLOCK_N), n_tokens, n_seg)
    b_k = load_rows(p_k, offsets(t_n, line_n, n_seg, k_h * ALIGN, k_w * ALIGN), D, BLOCK_D)
    b_v = load_rows(p_v, offsets(t_n, line_n, n_seg, v_h * ALIGN, v_w * ALIGN), D, BLOCK_D)
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    full = tokens // BLOCK_M * BLOCK_M
    o_t = full + tl.arange(0, BLOCK_T)
    t_t, line_t, m_t = place(o_t, tokens, seg)
    b_qt = load_rows(p_q, offsets(t_t, line_t, seg, q_h * ALIGN, q_w * ALIGN), D, BLOCK_D)
    b_gt = load_rows(p_g, offsets(t_t, line_t, seg, g_h * ALIGN, g_w * ALIGN), D, BLOCK_D)
    # An infinite logarithm makes every weight of a query past the end zero.
    b_lt = tl.load(p_pair + 2 * o_t, mask=m_t, other=float("inf"))
    b_dt = tl.load(p_pair + 2 * o_t + 1, mask=m_t, other=0.0)
    for m in tl.range(0, full, BLOCK_M):
        t = m + tl.arange(0, BLOCK_M)
        line = divide(t, seg[0])
        b_q = load_rows(p_q, offsets(t, line, seg, q_h * ALIGN, q_w * ALIGN), D, BLOCK_D)
        b_g = load_rows(p_g, offsets(t, line, seg, g_h * ALIGN, g_w * ALIGN), D, BLOCK_D)
        # One load of 2 BLOCK_M numbers: Triton would replace two loads of BLOCK_M by one for each thread and number.
        b_pair = tl.load(p_pair + 2 * m + tl.arange(0, 2 * BLOCK_M))
        b_lse, b_delta = tl.split(tl.reshape(b_pair, [BLOCK_M, 2]))
        b_dk, b_dv = key_gradient(b_dk, b_dv, b_k, b_v, b_q, b_g, b_lse, b_delta, SCALE)
    if full < tokens:
        b_dk, b_dv = key_gradient(b_dk, b_dv, b_k, b_v, b_qt, b_gt, b_lt, b_dt, SCALE)
    if PALE:
        m_new = not_crossing(line_n, p, by_column, rows)
        b_dk = tl.where(m_new[:, None], b_dk, 0.0)
        b_dv = tl.where(m_new[:, None], b_dv, 0.0)
    o_image = b * (h * w * heads * D) + head * D
    o_out = offsets(t_n, line_n, n_seg, w * heads * D, heads * D)
    store_rows(p_dk + o_image, o_out, m_n, b_dk * (SCALE * 0.6931471805599453), D, BLOCK_D)
    store_rows(p_dv + o_image, o_out, m_n, b_dv, D, BLOCK_D)


@triton.jit(do_not_specialize=RUN_TIME)
def attention_backward_group(
    p_g, p_q, p_k, p_v, p_out, p_lse, p_dq, p_dk, p_dv, h, w, heads, split, per,
    r_n, r_first, r_step, r_many, r_big, r_small, c_n, c_first, c_step, c_many, c_big, c_small,
    g_b, g_h, g_w, g_n, q_b, q_h, q_w, q_n, k_b, k_h, k_w, k_n, v_b, v_h, v_w, v_n,
    D: tl.constexpr, BLOCK_D: tl.constexpr, SCALE: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute all three gradients of a group of up to BLOCK_N tokens in one loop; weights are computed once."""
    b = tl.program_id(2).to(tl.int64)
    p = tl.program_id(1) // heads
    head = tl.program_id(1) % heads
    rows = (r_n, r_first, r_step, r_many, r_big, r_small)
    columns = (c_n, c_first, c_step, c_many, c_big, c_small)
    tokens, before, seg = segment(p, head >= split, h, w, rows, columns)
    if tokens == 0:
        return
    p_g += (b * g_b + head * g_n) * ALIGN
    p_q += (b * q_b + head * q_n) * ALIGN
    p_k += (b * k_b + head * k_n) * ALIGN
    p_v += (b * v_b + head * v_n) * ALIGN
    p_lse += (b * heads + head) * (h * w) + before
    o_image = b * (h * w * heads * D) + head * D
    t_n, line_n, m_n = place(tl.arange(0, BLOCK_N), tokens, seg)
    b_k = load_rows(p_k, offsets(t_n, line_n, seg, k_h * ALIGN, k_w * ALIGN), D, BLOCK_D)
    b_v = load_rows(p_v, offsets(t_n, line_n, seg, v_h * ALIGN, v_w * ALIGN), D, BLOCK_D)
    b_dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    b_dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for m in tl.range(0, tokens if BLOCK_M < BLOCK_N else 1, BLOCK_M):
        o_m = m + tl.arange(0, BLOCK_M)
        t_m, line_m, m_m = place(o_m, tokens, seg)
        o_out = offsets(t_m, line_m, seg, w * heads * D, heads * D)
        b_q = load_rows(p_q, offsets(t_m, line_m, seg, q_h * ALIGN, q_w * ALIGN), D, BLOCK_D)
        b_g = load_rows(p_g, offsets(t_m, line_m, seg, g_h * ALIGN, g_w * ALIGN), D, BLOCK_D)
        b_out = load_rows(p_out + o_image, o_out, D, BLOCK_D)
        # An infinite logarithm makes every weight of a query past the end zero. Four copies of each: Triton would
        # replace a load of BLOCK_M numbers by one for each thread and number.
        o_copy = o_m[:, None] + tl.zeros([1, 4], tl.int32)
        b_lse = tl.max(tl.load(p_lse + o_copy, mask=m_m[:, None], other=float("inf")), 1)
        b_delta = tl.sum(b_g.to(tl.float32) * b_out.to(tl.float32), 1)
        # Transposed, (keys, queries): p and ds are then ready as the left operands of dv and dk.
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision="ieee")
        b_p = tl.where(m_n[:, None], tl.math.exp2(b_s * SCALE - b_lse[None, :]), 0.0)
        b_dp = tl.zeros([BLOCK_N, BLOCK_M], tl.float32) - b_delta[None, :]
        b_dp = tl.dot(b_v, tl.trans(b_g), b_dp, input_precision="ieee")
        b_dv = tl.dot(b_p.to(b_g.dtype), b_g, b_dv, input_precision="ieee")
        b_ds = (b_p * b_dp).to(b_q.dtype)
        b_dk = tl.dot(b_ds, b_q, b_dk, input_precision="ieee")
        b_dq = tl.dot(tl.trans(b_ds), b_k, input_precision="ieee")
        store_rows(p_dq + o_image, o_out, m_m, b_dq * (SCALE * 0.6931471805599453), D, BLOCK_D)
    o_out = offsets(t_n, line_n, seg, w * heads * D, heads * D)
    store_rows(p_dk + o_image, o_out, m_n, b_dk * (SCALE * 0.6931471805599453), D, BLOCK_D)
    store_rows(p_dv + o_image, o_out, m_n, b_dv, D, BLOCK_D)
