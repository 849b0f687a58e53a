"""What the attention kernels share: the rule of visibility, the logits, tile loads and the order of programs.

Everything here is written once for forward and backward, so that the two cannot disagree.

Constexprs common to all kernels:
  HAS_LEFT, HAS_RIGHT  the window is bounded on that side (causal: right reach 0)
  TOP_LEFT             the diagonal starts at key 0 rather than at key seqlen_k - seqlen_q
  UNSEEN               position may leave keys that no query sees, or queries that see no key; they may hold NaN
  VARLEN               packed sequences, bounds in CU_SEQLENS_Q / CU_SEQLENS_K
  HAS_BIAS, HAS_MASK, HAS_ALIBI, HAS_SOFTCAP, HAS_SINKS
  TMA                  streamed tensors are 4-D tensor descriptors, not pointers
  PRECISION            of float32 products: "ieee" or "tf32"

  UNIT                 of the logits inside the kernels: log2 e, so that exp is the hardware's exp2 at no cost, or 1 for
                       float32 inputs, where the rounding of large logits in the other unit would show

Logits are formed by a rounded multiplication followed by a subtraction, never by one fused multiply-add: with a fused one
the maximum's own exponent is a rounding residue that grows with the logit, and huge logits overflow. The launcher turns
fusion off.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)

# Integer arguments that Triton must not compile a variant for each value of (1, multiples of 16). Strides are not
# among them: knowing that they are multiples of 16 is what makes loads 16 bytes wide.
SIZES = [
    "num_blocks", "num_heads", "heads_per_group", "heads_q", "heads_k", "group", "batch", "seqlen_q", "seqlen_k", "total_q", "total_k",
    "window_left", "window_right", "bias_m", "bias_n", "mask_m", "mask_n", "m_tiles", "n_tiles", "bias_heads",
]  # fmt: skip


@triton.jit
def exp_of(x, UNIT: tl.constexpr):
    """exp of a difference of logits."""
    if UNIT != LOG2E:
        x = x * LOG2E
    return tl.exp2(x)


@triton.jit
def program_block(num_blocks, num_heads, heads_per_group, LONGEST_LAST: tl.constexpr, NUM_XCDS: tl.constexpr):
    """Block and (batch x head) of this program.

    Heads are taken in groups whose K and V fit in the cache; inside a group the block index is the slow one, so that
    with a triangular mask the longest blocks of the whole group start first and the short ones fill the gaps.
    AMD deals workgroups to its NUM_XCDS chiplets in turn: undoing that keeps neighbours on one chiplet's L2.
    """
    pid = tl.program_id(0)
    if NUM_XCDS > 1:
        total = num_blocks * num_heads
        share = total // NUM_XCDS
        if pid < share * NUM_XCDS:
            pid = (pid % NUM_XCDS) * share + pid // NUM_XCDS
    per_group = num_blocks * heads_per_group
    group = pid // per_group
    rest = pid - group * per_group
    first_head = group * heads_per_group
    heads = tl.minimum(heads_per_group, num_heads - first_head)
    block = rest // heads
    head = first_head + rest - block * heads
    if LONGEST_LAST:
        block = num_blocks - 1 - block
    return block, head


@triton.jit
def sequence_bounds(CU_SEQLENS, b, total):
    """Start and length of packed sequence b, forced into the tensor whatever CU_SEQLENS holds."""
    start = tl.minimum(tl.maximum(tl.load(CU_SEQLENS + b).to(tl.int64), 0), total)
    end = tl.minimum(tl.maximum(tl.load(CU_SEQLENS + b + 1).to(tl.int64), start), total)
    return start, (end - start).to(tl.int32)


@triton.jit
def visible(
    query_pos, key_pos, seqlen_k, diagonal, window_left, window_right,
    CHECK_END: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr,
):  # fmt: skip
    """Which keys a query may see by position: the only statement of causal and window. Broadcasts its positions.

    CHECK_END: the tile may run over the last key. Distances are compared with scalars, which takes fewer registers
    than comparing positions.
    """
    distance = query_pos - key_pos
    ok = distance == distance
    if HAS_RIGHT:  # key <= query + diagonal + right
        ok = ok & (distance >= -(diagonal + window_right))
    if HAS_LEFT:  # key >= query + diagonal - left
        ok = ok & (distance <= window_left - diagonal)
    if CHECK_END:
        ok = ok & (key_pos < seqlen_k)
    return ok


@triton.jit
def seen_keys(
    m_start, m_last, seqlen_q, seqlen_k, diagonal, window_left, window_right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """Keys [lo, hi) that some query of rows m_start..m_last sees, and [full_lo, full_hi) that all of them see."""
    lo = 0
    hi = seqlen_k
    full_lo = 0
    full_hi = seqlen_k
    if HAS_RIGHT:
        hi = tl.maximum(0, tl.minimum(seqlen_k, m_last + diagonal + window_right + 1))
        full_hi = tl.maximum(0, tl.minimum(seqlen_k, m_start + diagonal + window_right + 1))
    if HAS_LEFT:
        lo = tl.maximum(0, m_start + diagonal - window_left)
        full_lo = tl.maximum(0, m_last + diagonal - window_left)
    return lo, hi, full_lo, full_hi


@triton.jit
def seeing_queries(
    n_start, n_last, seqlen_q, seqlen_k, diagonal, window_left, window_right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr
):
    """Queries [lo, hi) that see some key of n_start..n_last, and [full_lo, full_hi) that see all of them."""
    lo = 0
    hi = seqlen_q
    full_lo = 0
    full_hi = seqlen_q
    if HAS_RIGHT:
        lo = tl.maximum(0, n_start - diagonal - window_right)
        full_lo = tl.maximum(0, n_last - diagonal - window_right)
    if HAS_LEFT:
        hi = tl.maximum(0, tl.minimum(seqlen_q, n_last - diagonal + window_left + 1))
        full_hi = tl.maximum(0, tl.minimum(seqlen_q, n_start - diagonal + window_left + 1))
    return lo, hi, full_lo, full_hi


@triton.jit
def block_ranges(lo, hi, full_lo, full_hi, BLOCK: tl.constexpr):
    """Four block-aligned marks a <= b <= c <= d: tiles in [a, d) have something visible, those in [b, c) everything."""
    a = lo // BLOCK * BLOCK
    d = tl.maximum(a, (hi + BLOCK - 1) // BLOCK * BLOCK)
    b = tl.minimum(tl.maximum((full_lo + BLOCK - 1) // BLOCK * BLOCK, a), d)
    c = tl.maximum(b, tl.minimum(full_hi // BLOCK * BLOCK, d))
    return a, b, c, d


@triton.jit
def load_rows(
    X, stride_row, start, lo, hi, b, h,
    ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr, CHECK_ROWS: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Rows start..start+ROWS of one head as a (ROWS, COLS) tile; columns past WIDTH and, if asked, rows outside [lo, hi) are 0.

    X is a pointer to row 0 of the head (64-bit offsets to the block, 32-bit ones inside it) or, with TMA, the
    descriptor of the whole 4-D tensor, whose hardware fills what lies outside the tensor with 0.
    """
    if TMA:
        tile = X.load([b, h, start, 0]).reshape([ROWS, COLS])
    else:
        rows = tl.arange(0, ROWS)
        cols = tl.arange(0, COLS)
        pointers = X + start.to(tl.int64) * stride_row + rows[:, None] * stride_row + cols[None, :]
        inside = ((start + rows >= lo) & (start + rows < hi))[:, None]
        if CHECK_ROWS and COLS != WIDTH:
            tile = tl.load(pointers, mask=inside & (cols < WIDTH)[None, :], other=0.0)
        elif CHECK_ROWS:
            tile = tl.load(pointers, mask=inside, other=0.0)
        elif COLS != WIDTH:
            tile = tl.load(pointers, mask=(cols < WIDTH)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile


@triton.jit
def store_rows(X, tile, stride_row, start, hi, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr):
    """Write a tile to rows start..hi of one head."""
    rows = tl.arange(0, ROWS)
    cols = tl.arange(0, COLS)
    pointers = X + start.to(tl.int64) * stride_row + rows[:, None] * stride_row + cols[None, :]
    inside = (start + rows < hi)[:, None]
    if COLS != WIDTH:
        inside = inside & (cols < WIDTH)[None, :]
    tl.store(pointers, tile.to(X.dtype.element_ty), mask=inside)


@triton.jit
def logits(
    products, query_pos, key_pos, seqlen_q, seqlen_k, scale, softcap, slope,
    BIAS, stride_bias_m, stride_bias_n, bias_m, bias_n, MASK, stride_mask_m, stride_mask_n, mask_m, mask_n,
    diagonal, window_left, window_right, edge,
    CHECK_END: tl.constexpr, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Logits in UNIT from q . k, -inf where hidden; what bias and mask let through; tanh, for the cap's derivative.

    products has its queries and keys on either axis: query_pos and key_pos broadcast against it. `edge` is a scalar:
    whether position hides anything in this tile. It is the same for all threads, so that inner tiles jump over the
    comparisons. (A loop of its own for the inner tiles costs registers: both loops' addresses and pipelines are alive
    at once.) CHECK_END: keys past the end must be hidden (not where the caller loads them as 0 or drops their results).
    """
    tanh = products
    if HAS_SOFTCAP:
        tanh = 1.0 - 2.0 / (tl.exp2(products * (scale * 2.0 * LOG2E / softcap)) + 1.0)
        s = tanh * (softcap * UNIT)
    else:
        s = products * (scale * UNIT)
    if HAS_ALIBI:  # always bottom-right, like the formula in the documentation
        distance = tl.abs(query_pos + (seqlen_k - seqlen_q) - key_pos)
        s = s - slope * UNIT * distance.to(tl.float32)
    ok = key_pos < seqlen_k
    if HAS_MASK or HAS_BIAS:
        ok = visible(query_pos, key_pos, seqlen_k, diagonal, window_left, window_right, True, HAS_LEFT, HAS_RIGHT)
        ok = ok & (query_pos < seqlen_q)
    elif HAS_LEFT or HAS_RIGHT or CHECK_END:
        if edge:
            seen = visible(query_pos, key_pos, seqlen_k, diagonal, window_left, window_right, CHECK_END, HAS_LEFT, HAS_RIGHT)
            s = tl.where(seen, s, float("-inf"))
    if HAS_MASK:  # positions past the mask's own size (a wrong max_seqlen) are hidden, not read
        inside = ok & (query_pos < mask_m) & (key_pos < mask_n)
        at = query_pos.to(tl.int64) * stride_mask_m + key_pos.to(tl.int64) * stride_mask_n
        ok = inside & (tl.load(MASK + at, mask=inside, other=0) != 0)
    if HAS_BIAS:
        inside = ok & (query_pos < bias_m) & (key_pos < bias_n)
        at = query_pos.to(tl.int64) * stride_bias_m + key_pos.to(tl.int64) * stride_bias_n
        bias = tl.load(BIAS + at, mask=inside, other=float("-inf")).to(tl.float32)
        ok = ok & (bias > float("-inf"))
        # a finite bias is never a mask: what overflows float32 is held at its ends
        s = tl.maximum(tl.minimum(s + bias * UNIT, FLOAT32_MAX), -FLOAT32_MAX)
    if HAS_MASK or HAS_BIAS:
        s = tl.where(ok, s, float("-inf"))
    return s, ok, tanh
