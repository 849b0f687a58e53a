"""Forward kernel: blocked online softmax (FlashAttention, Dao et al. 2022, Algorithm 1; FlashAttention-2 loop order)."""

import triton
import triton.language as tl

from .common import LN2, SIZES, block_ranges, exp_of, load_rows, logits, program_block, seen_keys, sequence_bounds, store_rows


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    Q, K, V, O, LSE,  # query, key, value (pointers or descriptors), output, log-sum-exp (float32, natural)
    BIAS, MASK, ALIBI, SINKS, CU_SEQLENS_Q, CU_SEQLENS_K,  # any may be None
    scale, softcap,
    stride_qb, stride_qh, stride_qm, stride_kb, stride_kh, stride_kn, stride_vb, stride_vh, stride_vn,
    stride_ob, stride_oh, stride_om, stride_lb, stride_lh,
    stride_bias_b, stride_bias_h, stride_bias_m, stride_bias_n, bias_m, bias_n,
    stride_mask_b, stride_mask_h, stride_mask_m, stride_mask_n, mask_m, mask_n,
    stride_ab, stride_ah,
    num_blocks, num_heads, heads_per_group, heads_q, group, seqlen_q, seqlen_k, total_q, total_k, window_left, window_right,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
    TOP_LEFT: tl.constexpr, UNSEEN: tl.constexpr, VARLEN: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, EVEN_K: tl.constexpr,
    UNIT: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr, NUM_XCDS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one query head against all keys that they see.

    EVEN_K: seqlen_k is a multiple of BLOCK_N (never set for packed sequences), so that no tile runs over its end.
    """
    CHECK_KEYS: tl.constexpr = UNSEEN or not EVEN_K
    block, bh = program_block(num_blocks, num_heads, heads_per_group, HAS_RIGHT, NUM_XCDS)
    b = bh // heads_q
    h = bh - b * heads_q
    hk = h // group
    m_start = block * BLOCK_M
    q_base = b.to(tl.int64) * stride_qb
    k_base = b.to(tl.int64) * stride_kb
    v_base = b.to(tl.int64) * stride_vb
    o_base = b.to(tl.int64) * stride_ob
    l_base = b.to(tl.int64) * stride_lb
    if VARLEN:
        first_q, seqlen_q = sequence_bounds(CU_SEQLENS_Q, b, total_q)
        first_k, seqlen_k = sequence_bounds(CU_SEQLENS_K, b, total_k)
        if m_start >= seqlen_q:
            return
        q_base = first_q * stride_qm
        k_base = first_k * stride_kn
        v_base = first_k * stride_vn
        o_base = first_q * stride_om
        l_base = first_q
    diagonal = seqlen_k - seqlen_q
    if TOP_LEFT:
        diagonal = 0

    if not TMA:
        Q += q_base + h.to(tl.int64) * stride_qh
        K += k_base + hk.to(tl.int64) * stride_kh
        V += v_base + hk.to(tl.int64) * stride_vh
    O += o_base + h.to(tl.int64) * stride_oh
    LSE += l_base + h.to(tl.int64) * stride_lh
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
    # slots that no query of the sequence sees are never read: they may hold NaN
    key_lo, key_hi, _, _ = seen_keys(
        0, seqlen_q - 1, seqlen_q, seqlen_k, diagonal, window_left, window_right, HAS_LEFT, HAS_RIGHT
    )

    rows = m_start + tl.arange(0, BLOCK_M)
    query_pos = rows[:, None]
    q = load_rows(Q, stride_qm, m_start, 0, seqlen_q, b, h, BLOCK_M, BLOCK_D, HEAD_DIM, True, TMA)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:  # one more logit in the denominator, with no value
        sink = tl.load(SINKS + h).to(tl.float32) * UNIT
        m = tl.zeros([BLOCK_M], tl.float32) + sink
        l = tl.where(m == float("-inf"), 0.0, 1.0)

    for n_start in tl.range(a, d, BLOCK_N, num_stages=NUM_STAGES):
        n_start = tl.multiple_of(n_start, BLOCK_N)
        key_pos = (n_start + tl.arange(0, BLOCK_N))[None, :]
        k = load_rows(K, stride_kn, n_start, key_lo, key_hi, b, hk, BLOCK_N, BLOCK_D, HEAD_DIM, CHECK_KEYS, TMA)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s, ok, tanh = logits(
            s, query_pos, key_pos, seqlen_q, seqlen_k, scale, softcap, slope,
            BIAS, stride_bias_m, stride_bias_n, bias_m, bias_n, MASK, stride_mask_m, stride_mask_n, mask_m, mask_n,
            diagonal, window_left, window_right, (n_start < inner_lo) | (n_start >= inner_hi),
            not EVEN_K, HAS_LEFT, HAS_RIGHT, HAS_SOFTCAP, HAS_ALIBI, HAS_BIAS, HAS_MASK, UNIT,
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(s, 1))
        m_safe = m_new
        if HAS_LEFT or UNSEEN or HAS_BIAS or HAS_MASK:  # a row that has seen nothing yet: -inf - -inf is NaN
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = exp_of(s - m_safe[:, None], UNIT)
        alpha = exp_of(m - m_safe, UNIT)
        l = l * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v = load_rows(V, stride_vn, n_start, key_lo, key_hi, b, hk, BLOCK_N, BLOCK_DV, HEAD_DIM_V, CHECK_KEYS, TMA)
        if HAS_BIAS or HAS_MASK:  # a hidden slot may hold NaN, and 0 * NaN is NaN
            seen = tl.max(ok.to(tl.int32), 0) > 0
            v = tl.where(seen[:, None], v, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        m = m_new

    empty = l == 0.0
    l = tl.where(empty, 1.0, l)
    acc = acc * tl.where(empty, 0.0, 1.0 / l)[:, None]
    lse = tl.where(empty, float("-inf"), m / UNIT + tl.log2(l) * LN2)
    store_rows(O, acc, stride_om, m_start, seqlen_q, BLOCK_M, BLOCK_DV, HEAD_DIM_V)
    tl.store(LSE + rows, lse, mask=rows < seqlen_q)
