"""Backward kernels: S and P recomputed from lse (FlashAttention, Dao et al. 2022, Algorithm 4).

    delta_i = sum_d dO_id O_id - dlse_i                  backward_delta_kernel
    P = exp(S - lse),  dP = dO V^T,  dS = P * (dP - delta) * softcap'
    dV = P^T dO,  dK = scale * dS^T Q                    backward_dkv_kernel, one program a key block (both, or one each)
    dQ = scale * dS K                                    backward_dq_kernel, one program a query block
    dbias = dS, summed where bias is broadcast           backward_dbias_kernel, one program a bias tile

Each output element is summed by one program in a fixed order: no atomics, repeatable bit for bit, and no scratch
beyond delta. The price is that S and dP are computed twice (7 matrix products, not 5).
"""

import triton
import triton.language as tl

from .common import SIZES, block_ranges, exp_of, load_rows, logits, program_block, seeing_queries, seen_keys, sequence_bounds, store_rows


@triton.jit(do_not_specialize=SIZES)
def backward_delta_kernel(
    O, DO, LSE, DLSE, DELTA,  # DLSE may be None
    stride_ob, stride_oh, stride_om, stride_dob, stride_doh, stride_dom, stride_dlb, stride_dlh, stride_dlm,
    stride_lb, stride_lh, num_blocks, heads_q, seqlen_q,
    BLOCK_M: tl.constexpr, BLOCK_DV: tl.constexpr, HEAD_DIM_V: tl.constexpr, HAS_DLSE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one head. Packed tensors are one sequence here.

    Rows that see no key get 0, whatever their gradients hold (even NaN).
    """
    pid = tl.program_id(0)
    bh = pid // num_blocks
    m_start = (pid - bh * num_blocks) * BLOCK_M
    b = (bh // heads_q).to(tl.int64)
    h = (bh % heads_q).to(tl.int64)
    o = load_rows(O + b * stride_ob + h * stride_oh, stride_om, m_start, 0, seqlen_q, b, h, BLOCK_M, BLOCK_DV, HEAD_DIM_V, True, False)
    do = load_rows(DO + b * stride_dob + h * stride_doh, stride_dom, m_start, 0, seqlen_q, b, h, BLOCK_M, BLOCK_DV, HEAD_DIM_V, True, False)
    # where O is 0 the product is: a row that sees nothing but a sink has O = 0, and a gradient that may be NaN
    delta = tl.sum(tl.where(o == 0.0, 0.0, o.to(tl.float32) * do.to(tl.float32)), 1)
    rows = m_start + tl.arange(0, BLOCK_M)
    inside = rows < seqlen_q
    if HAS_DLSE:
        delta -= tl.load(DLSE + b * stride_dlb + h * stride_dlh + rows.to(tl.int64) * stride_dlm, mask=inside, other=0.0)
    lse = tl.load(LSE + b * stride_lb + h * stride_lh + rows, mask=inside, other=0.0)
    tl.store(DELTA + b * stride_lb + h * stride_lh + rows, tl.where(lse == float("-inf"), 0.0, delta), mask=inside)


@triton.jit
def load_lse(LSE, rows, seqlen_q, UNIT: tl.constexpr, CHECK: tl.constexpr, EMPTY_ROWS: tl.constexpr):
    """lse in UNIT; +inf, so that P = 0, for rows outside the sequence (CHECK) and rows that see no key (EMPTY_ROWS)."""
    if CHECK:
        lse = tl.load(LSE + rows, mask=rows < seqlen_q, other=float("inf")) * UNIT
    else:
        lse = tl.load(LSE + rows) * UNIT
    if EMPTY_ROWS:
        lse = tl.where(lse == float("-inf"), float("inf"), lse)
    return lse


@triton.jit
def load_delta(DELTA, rows, seqlen_q, CHECK: tl.constexpr):
    if CHECK:
        delta = tl.load(DELTA + rows, mask=rows < seqlen_q, other=0.0)
    else:
        delta = tl.load(DELTA + rows)
    return delta


@triton.jit
def probabilities(s, lse, UNIT: tl.constexpr):
    """P = exp(S - lse), at most 1 whatever the rounding of a huge lse; 0 where hidden (S is -inf there)."""
    return exp_of(tl.minimum(s - lse, 0.0), UNIT)


@triton.jit
def score_gradient(p, dp, delta, tanh, ok, MAY_HIDE_NAN: tl.constexpr, HAS_SOFTCAP: tl.constexpr):
    """dS before the scale: the gradient of the logits, through the cap where there is one."""
    ds = p * (dp - delta)
    if HAS_SOFTCAP:
        ds = ds * (1.0 - tanh * tanh)
    if MAY_HIDE_NAN:  # p is 0 where hidden, but dp may be NaN there; slots hidden by position alone were loaded as 0
        ds = tl.where(ok, ds, 0.0)
    return ds


@triton.jit(do_not_specialize=SIZES)
def backward_dkv_kernel(
    Q, K, V, DO, LSE, DELTA, DK, DV,
    BIAS, MASK, ALIBI, CU_SEQLENS_Q, CU_SEQLENS_K,
    scale, softcap,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_lb, stride_lh,
    stride_dkb, stride_dkh, stride_dkn, stride_dvb, stride_dvh, stride_dvn,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, bias_m, bias_n,
    stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, mask_m, mask_n,
    stride_ab, stride_ah,
    num_blocks, num_heads, heads_per_group, heads_k, group, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    TOP_LEFT: tl.constexpr, UNSEEN: tl.constexpr, VARLEN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EVEN_Q: tl.constexpr,
    UNIT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, NUM_XCDS: tl.constexpr, NUM_STAGES: tl.constexpr,
    NEED_DK: tl.constexpr, NEED_DV: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one key/value head against all queries, of all heads of its group, that see them.

    Score tiles are (keys, queries), so that P^T and dS^T are left operands, which can stay in registers.
    EVEN_Q: seqlen_q is a multiple of BLOCK_M (never set for packed sequences).
    """
    CHECK_QUERIES: tl.constexpr = UNSEEN or not EVEN_Q
    block, bh = program_block(num_blocks, num_heads, heads_per_group, False, NUM_XCDS)
    b = bh // heads_k
    hk = bh - b * heads_k
    n_start = block * BLOCK_N
    q_base = b.to(tl.int64) * stride_qb
    do_base = b.to(tl.int64) * stride_dob
    l_base = b.to(tl.int64) * stride_lb
    k_base = b.to(tl.int64) * stride_kb
    v_base = b.to(tl.int64) * stride_vb
    dk_base = b.to(tl.int64) * stride_dkb
    dv_base = b.to(tl.int64) * stride_dvb
    if VARLEN:
        first_q, seqlen_q = sequence_bounds(CU_SEQLENS_Q, b, total_q)
        first_k, seqlen_k = sequence_bounds(CU_SEQLENS_K, b, total_k)
        if n_start >= seqlen_k:
            return
        q_base = first_q * stride_qm
        do_base = first_q * stride_dom
        l_base = first_q
        k_base = first_k * stride_kn
        v_base = first_k * stride_vn
        dk_base = first_k * stride_dkn
        dv_base = first_k * stride_dvn
    diagonal = seqlen_k - seqlen_q
    if TOP_LEFT:
        diagonal = 0

    n_last = tl.minimum(n_start + BLOCK_N, seqlen_k) - 1
    lo, hi, full_lo, full_hi = seeing_queries(
        n_start, n_last, seqlen_q, seqlen_k, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT
    )
    a, inner_lo, inner_hi, d = block_ranges(lo, hi, full_lo, full_hi, BLOCK_M)
    if not HAS_LEFT:  # rows past seqlen_q have lse = +inf: the last block needs no mask
        inner_hi = d
    # slots that no query sees, and queries that see nothing, are never read: they may hold NaN
    query_lo, query_hi, _, _ = seeing_queries(
        0, seqlen_k - 1, seqlen_q, seqlen_k, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT
    )
    key_lo, key_hi, _, _ = seen_keys(
        0, seqlen_q - 1, seqlen_q, seqlen_k, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT
    )

    key_pos = (n_start + tl.arange(0, BLOCK_N))[:, None]
    k = load_rows(
        K + k_base + hk.to(tl.int64) * stride_kh, stride_kn, n_start, key_lo, key_hi, b, hk, BLOCK_N, BLOCK_D, HEAD_DIM, True, False
    )
    # what is not needed is never used, and dropped by the compiler
    v = load_rows(
        V + v_base + hk.to(tl.int64) * stride_vh, stride_vn, n_start, key_lo, key_hi, b, hk, BLOCK_N, BLOCK_DV, HEAD_DIM_V, True, False
    )
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_DV], tl.float32)

    for g in tl.range(0, group):
        h = hk * group + g
        q_head = Q
        do_head = DO
        if not TMA:
            q_head = Q + q_base + h.to(tl.int64) * stride_qh
            do_head = DO + do_base + h.to(tl.int64) * stride_doh
        lse_head = LSE + l_base + h.to(tl.int64) * stride_lh
        delta_head = DELTA + l_base + h.to(tl.int64) * stride_lh
        bias_head = BIAS
        mask_head = MASK
        if HAS_BIAS:
            bias_head = BIAS + b.to(tl.int64) * stride_bias_b + h.to(tl.int64) * stride_bias_h
        if HAS_MASK:
            mask_head = MASK + b.to(tl.int64) * stride_mask_b + h.to(tl.int64) * stride_mask_h
        slope = 0.0
        if HAS_ALIBI:
            slope = tl.load(ALIBI + b.to(tl.int64) * stride_ab + h.to(tl.int64) * stride_ah)
        for m_start in tl.range(a, d, BLOCK_M, num_stages=NUM_STAGES):
            m_start = tl.multiple_of(m_start, BLOCK_M)
            rows = m_start + tl.arange(0, BLOCK_M)
            q = load_rows(q_head, stride_qm, m_start, query_lo, query_hi, b, h, BLOCK_M, BLOCK_D, HEAD_DIM, CHECK_QUERIES, TMA)
            s = tl.dot(k, tl.trans(q), input_precision=PRECISION)
            lse = load_lse(lse_head, rows, seqlen_q, UNIT, not EVEN_Q, UNSEEN or HAS_BIAS or HAS_MASK)
            s, ok, tanh = logits(
                s, rows[None, :], key_pos, seqlen_q, seqlen_k, scale, softcap, slope,
                bias_head, stride_bias_m, stride_bias_n, bias_m, bias_n, mask_head, stride_mask_m, stride_mask_n, mask_m, mask_n,
                diagonal, window_left, window_right, (m_start < inner_lo) | (m_start >= inner_hi),
                False, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS, HAS_MASK, UNIT,
            )  # fmt: skip
            p = probabilities(s, lse[None, :], UNIT)
            do = load_rows(do_head, stride_dom, m_start, query_lo, query_hi, b, h, BLOCK_M, BLOCK_DV, HEAD_DIM_V, CHECK_QUERIES, TMA)
            if HAS_BIAS or HAS_MASK:  # queries that see nothing here may hold NaN, and 0 * NaN is NaN
                sees = (tl.max(ok.to(tl.int32), 0) > 0)[:, None]
                q = tl.where(sees, q, 0.0)
                do = tl.where(sees, do, 0.0)
            if NEED_DV:
                dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
            if NEED_DK:
                dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
                delta = load_delta(delta_head, rows, seqlen_q, not EVEN_Q)
                ds = score_gradient(p, dp, delta[None, :], tanh, ok, HAS_BIAS or HAS_MASK, HAS_SOFTCAP)
                dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)

    if NEED_DK:
        dk_head = DK + dk_base + hk.to(tl.int64) * stride_dkh
        store_rows(dk_head, dk * scale, stride_dkn, n_start, seqlen_k, BLOCK_N, BLOCK_D, HEAD_DIM)
    if NEED_DV:
        dv_head = DV + dv_base + hk.to(tl.int64) * stride_dvh
        store_rows(dv_head, dv, stride_dvn, n_start, seqlen_k, BLOCK_N, BLOCK_DV, HEAD_DIM_V)


@triton.jit(do_not_specialize=SIZES)
def backward_dq_kernel(
    Q, K, V, DO, LSE, DELTA, DQ,
    BIAS, MASK, ALIBI, CU_SEQLENS_Q, CU_SEQLENS_K,
    scale, softcap,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_lb, stride_lh, stride_dqb, stride_dqh, stride_dqm,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, bias_m, bias_n,
    stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, mask_m, mask_n,
    stride_ab, stride_ah,
    num_blocks, num_heads, heads_per_group, heads_q, group, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    TOP_LEFT: tl.constexpr, UNSEEN: tl.constexpr, VARLEN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_SOFTCAP: tl.constexpr, EVEN_K: tl.constexpr,
    UNIT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, NUM_XCDS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one query head against all keys that they see.

    Keys past the end are loaded as 0 and add nothing to dQ: only the window hides.
    """
    CHECK_KEYS: tl.constexpr = UNSEEN or not EVEN_K
    block, bh = program_block(num_blocks, num_heads, heads_per_group, HAS_RIGHT, NUM_XCDS)
    b = bh // heads_q
    h = bh - b * heads_q
    hk = h // group
    m_start = block * BLOCK_M
    q_base = b.to(tl.int64) * stride_qb
    do_base = b.to(tl.int64) * stride_dob
    dq_base = b.to(tl.int64) * stride_dqb
    l_base = b.to(tl.int64) * stride_lb
    k_base = b.to(tl.int64) * stride_kb
    v_base = b.to(tl.int64) * stride_vb
    if VARLEN:
        first_q, seqlen_q = sequence_bounds(CU_SEQLENS_Q, b, total_q)
        first_k, seqlen_k = sequence_bounds(CU_SEQLENS_K, b, total_k)
        if m_start >= seqlen_q:
            return
        q_base = first_q * stride_qm
        do_base = first_q * stride_dom
        dq_base = first_q * stride_dqm
        l_base = first_q
        k_base = first_k * stride_kn
        v_base = first_k * stride_vn
    diagonal = seqlen_k - seqlen_q
    if TOP_LEFT:
        diagonal = 0
    if not TMA:
        K += k_base + hk.to(tl.int64) * stride_kh
        V += v_base + hk.to(tl.int64) * stride_vh
    LSE += l_base + h.to(tl.int64) * stride_lh
    DELTA += l_base + h.to(tl.int64) * stride_lh
    if HAS_BIAS:
        BIAS += b.to(tl.int64) * stride_bias_b + h.to(tl.int64) * stride_bias_h
    if HAS_MASK:
        MASK += b.to(tl.int64) * stride_mask_b + h.to(tl.int64) * stride_mask_h
    slope = 0.0
    if HAS_ALIBI:
        slope = tl.load(ALIBI + b.to(tl.int64) * stride_ab + h.to(tl.int64) * stride_ah)

    m_last = tl.minimum(m_start + BLOCK_M, seqlen_q) - 1
    lo, hi, full_lo, full_hi = seen_keys(
        m_start, m_last, seqlen_q, seqlen_k, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT
    )
    a, inner_lo, inner_hi, d = block_ranges(lo, hi, full_lo, full_hi, BLOCK_N)
    key_lo, key_hi, _, _ = seen_keys(
        0, seqlen_q - 1, seqlen_q, seqlen_k, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT
    )
    query_lo, query_hi, _, _ = seeing_queries(
        0, seqlen_k - 1, seqlen_q, seqlen_k, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT
    )

    rows = m_start + tl.arange(0, BLOCK_M)
    query_pos = rows[:, None]
    q_head = Q + q_base + h.to(tl.int64) * stride_qh
    q = load_rows(q_head, stride_qm, m_start, query_lo, query_hi, b, h, BLOCK_M, BLOCK_D, HEAD_DIM, True, False)
    do_head = DO + do_base + h.to(tl.int64) * stride_doh
    do = load_rows(do_head, stride_dom, m_start, query_lo, query_hi, b, h, BLOCK_M, BLOCK_DV, HEAD_DIM_V, True, False)
    lse = load_lse(LSE, rows, seqlen_q, UNIT, True, True)
    delta = load_delta(DELTA, rows, seqlen_q, True)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for n_start in tl.range(a, d, BLOCK_N, num_stages=NUM_STAGES):
        n_start = tl.multiple_of(n_start, BLOCK_N)
        key_pos = (n_start + tl.arange(0, BLOCK_N))[None, :]
        k = load_rows(K, stride_kn, n_start, key_lo, key_hi, b, hk, BLOCK_N, BLOCK_D, HEAD_DIM, CHECK_KEYS, TMA)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        v = load_rows(V, stride_vn, n_start, key_lo, key_hi, b, hk, BLOCK_N, BLOCK_DV, HEAD_DIM_V, CHECK_KEYS, TMA)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        s, ok, tanh = logits(
            s, query_pos, key_pos, seqlen_q, seqlen_k, scale, softcap, slope,
            BIAS, stride_bias_m, stride_bias_n, bias_m, bias_n, MASK, stride_mask_m, stride_mask_n, mask_m, mask_n,
            diagonal, window_left, window_right, (n_start < inner_lo) | (n_start >= inner_hi),
            False, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS, HAS_MASK, UNIT,
        )  # fmt: skip
        p = probabilities(s, lse[:, None], UNIT)
        ds = score_gradient(p, dp, delta[:, None], tanh, ok, HAS_BIAS or HAS_MASK, HAS_SOFTCAP)
        if HAS_BIAS or HAS_MASK:
            k = tl.where((tl.max(ok.to(tl.int32), 0) > 0)[:, None], k, 0.0)
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
    store_rows(DQ + dq_base + h.to(tl.int64) * stride_dqh, dq * scale, stride_dqm, m_start, seqlen_q, BLOCK_M, BLOCK_D, HEAD_DIM)


@triton.jit(do_not_specialize=SIZES)
def backward_dbias_kernel(
    Q, K, V, DO, LSE, DELTA, DBIAS,
    BIAS, MASK, ALIBI, CU_SEQLENS_Q, CU_SEQLENS_K,
    scale, softcap,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_dob, stride_doh, stride_dom, stride_lb, stride_lh,
    stride_dbias_b, stride_dbias_h, stride_dbias_m, stride_dbias_n,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, bias_m, bias_n,
    stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, mask_m, mask_n,
    stride_ab, stride_ah,
    m_tiles, n_tiles, bias_heads, batch, heads_q, group, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    TOP_LEFT: tl.constexpr, UNSEEN: tl.constexpr, VARLEN: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_ALIBI: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    SUM_B: tl.constexpr, SUM_H: tl.constexpr, SUM_M: tl.constexpr, SUM_N: tl.constexpr, UNIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: one tile of the bias gradient, dS summed over the dimensions SUM_* along which bias is broadcast."""
    pid = tl.program_id(0)
    tile_n = pid % n_tiles
    tile_m = pid // n_tiles % m_tiles
    bias_bh = pid // (n_tiles * m_tiles)
    bias_b = bias_bh // bias_heads
    bias_h = bias_bh % bias_heads
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for i in tl.range(0, batch if SUM_B else 1):  # where bias is broadcast its own index is 0
        b = bias_b + i
        q_base = b.to(tl.int64) * stride_qb
        do_base = b.to(tl.int64) * stride_dob
        l_base = b.to(tl.int64) * stride_lb
        k_base = b.to(tl.int64) * stride_kb
        v_base = b.to(tl.int64) * stride_vb
        rows_q = seqlen_q
        rows_k = seqlen_k
        if VARLEN:
            first_q, rows_q = sequence_bounds(CU_SEQLENS_Q, b, total_q)
            first_k, rows_k = sequence_bounds(CU_SEQLENS_K, b, total_k)
            q_base = first_q * stride_qm
            do_base = first_q * stride_dom
            l_base = first_q
            k_base = first_k * stride_kn
            v_base = first_k * stride_vn
        diagonal = rows_k - rows_q
        if TOP_LEFT:
            diagonal = 0
        n_hi = rows_k
        if not SUM_N:
            n_hi = tl.minimum((tile_n + 1) * BLOCK_N, rows_k)
        for n_start in tl.range(tile_n * BLOCK_N, n_hi, BLOCK_N):
            n_start = tl.multiple_of(n_start, BLOCK_N)
            n_last = tl.minimum(n_start + BLOCK_N, rows_k) - 1
            lo, hi, _, _ = seeing_queries(
                n_start, n_last, rows_q, rows_k, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT
            )
            m_lo = lo // BLOCK_M * BLOCK_M
            m_hi = hi
            if not SUM_M:
                m_lo = tl.maximum(m_lo, tile_m * BLOCK_M)
                m_hi = tl.minimum(hi, (tile_m + 1) * BLOCK_M)
            key_pos = (n_start + tl.arange(0, BLOCK_N))[None, :]
            for j in tl.range(0, heads_q if SUM_H else 1):
                h = bias_h + j
                hk = h // group
                k_head = K + k_base + hk.to(tl.int64) * stride_kh
                v_head = V + v_base + hk.to(tl.int64) * stride_vh
                k = load_rows(k_head, stride_kn, n_start, 0, rows_k, b, hk, BLOCK_N, BLOCK_D, HEAD_DIM, True, False)
                v = load_rows(v_head, stride_vn, n_start, 0, rows_k, b, hk, BLOCK_N, BLOCK_DV, HEAD_DIM_V, True, False)
                slope = 0.0
                if HAS_ALIBI:
                    slope = tl.load(ALIBI + b.to(tl.int64) * stride_ab + h.to(tl.int64) * stride_ah)
                mask_head = MASK
                if HAS_MASK:
                    mask_head = MASK + b.to(tl.int64) * stride_mask_b + h.to(tl.int64) * stride_mask_h
                bias_head = BIAS + b.to(tl.int64) * stride_bias_b + h.to(tl.int64) * stride_bias_h
                for m_start in tl.range(m_lo, m_hi, BLOCK_M):
                    m_start = tl.multiple_of(m_start, BLOCK_M)
                    q_head = Q + q_base + h.to(tl.int64) * stride_qh
                    do_head = DO + do_base + h.to(tl.int64) * stride_doh
                    q = load_rows(q_head, stride_qm, m_start, 0, rows_q, b, h, BLOCK_M, BLOCK_D, HEAD_DIM, True, False)
                    do = load_rows(do_head, stride_dom, m_start, 0, rows_q, b, h, BLOCK_M, BLOCK_DV, HEAD_DIM_V, True, False)
                    rows = m_start + tl.arange(0, BLOCK_M)
                    lse = load_lse(LSE + l_base + h.to(tl.int64) * stride_lh, rows, rows_q, UNIT, True, True)
                    delta = load_delta(DELTA + l_base + h.to(tl.int64) * stride_lh, rows, rows_q, True)
                    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
                    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
                    s, ok, tanh = logits(
                        s, rows[:, None], key_pos, rows_q, rows_k, scale, softcap, slope,
                        bias_head, stride_bias_m, stride_bias_n, bias_m, bias_n,
                        mask_head, stride_mask_m, stride_mask_n, mask_m, mask_n,
                        diagonal, window_left, window_right, True,
                        True, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, True, HAS_MASK, UNIT,
                    )  # fmt: skip
                    p = probabilities(s, lse[:, None], UNIT)
                    # bias is added after the cap: its gradient does not pass through it
                    acc += score_gradient(p, dp, delta[:, None], tanh, ok, True, False)

    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    if SUM_M:
        column = tl.sum(acc, 0)
        if SUM_N:
            tl.store(DBIAS + bias_b.to(tl.int64) * stride_dbias_b + bias_h.to(tl.int64) * stride_dbias_h, tl.sum(column, 0))
        else:
            at = bias_b.to(tl.int64) * stride_dbias_b + bias_h.to(tl.int64) * stride_dbias_h + n.to(tl.int64) * stride_dbias_n
            tl.store(DBIAS + at, column, mask=n < seqlen_k)
    elif SUM_N:
        at = bias_b.to(tl.int64) * stride_dbias_b + bias_h.to(tl.int64) * stride_dbias_h + m.to(tl.int64) * stride_dbias_m
        tl.store(DBIAS + at, tl.sum(acc, 1), mask=m < seqlen_q)
    else:
        at = bias_b.to(tl.int64) * stride_dbias_b + bias_h.to(tl.int64) * stride_dbias_h
        at = at + m.to(tl.int64)[:, None] * stride_dbias_m + n.to(tl.int64)[None, :] * stride_dbias_n
        tl.store(DBIAS + at, acc, mask=(m < seqlen_q)[:, None] & (n < seqlen_k)[None, :])
