// Which program does what, which keys a query sees, and the logits: written once for forward and backward, so that the two
// cannot disagree. The meaning is that of DESIGN's formula; backends/triton/common.py says the same in Triton.
#pragma once

struct Program {
    int block, head;  // head counts over batch and heads
};

// Heads are taken in groups whose K and V fit in the cache; inside a group the block index is the slow one, so that with a
// triangular mask the longest blocks of the whole group start first and the short ones fill the gaps. AMD deals workgroups to its
// NUM_XCDS chiplets in turn: undoing that keeps the heads that share K and V on one chiplet's L2.
PF_DEVICE Program program_of(const Call& call, bool longest_last) {
    int index = program_index();
    if constexpr (NUM_XCDS > 1) {
        const int share = static_cast<int>(static_cast<int64>(call.num_blocks) * call.num_heads / NUM_XCDS);
        if (index < share * NUM_XCDS) index = index % NUM_XCDS * share + index / NUM_XCDS;
    }
    const int per_group = call.num_blocks * call.heads_per_group;
    const int group = index / per_group, rest = index - group * per_group;
    const int first = group * call.heads_per_group;
    const int heads = least(call.heads_per_group, call.num_heads - first);
    const int block = rest / heads;
    return {longest_last ? call.num_blocks - 1 - block : block, first + rest - block * heads};
}

// One sequence: its lengths and where its rows start. Bounds are forced into the tensors whatever cu_seqlens holds.
struct Sequence {
    int rows_q, rows_k;
    int64 batch_q, batch_k;  // index along the batch stride
    int64 first_q, first_k;  // row in the packed tensor
    int diagonal;            // the key that query 0 may see last in a causal call
};

PF_DEVICE Sequence sequence_of(const Call& call, const void* cu_seqlens_q, const void* cu_seqlens_k, int b) {
    Sequence s = {call.seqlen_q, call.seqlen_k, b, b, 0, 0, 0};
    if constexpr (VARLEN) {
        const Index* ends_q = static_cast<const Index*>(cu_seqlens_q) + b;
        const Index* ends_k = static_cast<const Index*>(cu_seqlens_k) + b;
        s.first_q = least(most(static_cast<int64>(ends_q[0]), int64(0)), call.total_q);
        s.first_k = least(most(static_cast<int64>(ends_k[0]), int64(0)), call.total_k);
        s.rows_q = static_cast<int>(least(most(static_cast<int64>(ends_q[1]), s.first_q), call.total_q) - s.first_q);
        s.rows_k = static_cast<int>(least(most(static_cast<int64>(ends_k[1]), s.first_k), call.total_k) - s.first_k);
        s.batch_q = s.batch_k = 0;
    }
    s.diagonal = TOP_LEFT ? 0 : s.rows_k - s.rows_q;
    return s;
}

struct Range {
    int lo, hi;            // some of the others see these
    int full_lo, full_hi;  // all of the others see these
};

// Keys that the queries first..last see. Sums are in 64 bits where a reach may be as large as an int.
PF_DEVICE Range seen_keys(const Call& call, const Sequence& s, int first, int last) {
    Range range = {0, s.rows_k, 0, s.rows_k};
    const auto clamp = [&](int64 key) { return static_cast<int>(least(most(key, int64(0)), static_cast<int64>(s.rows_k))); };
    if constexpr (HAS_RIGHT) {
        range.hi = clamp(static_cast<int64>(last) + s.diagonal + call.window_right + 1);
        range.full_hi = clamp(static_cast<int64>(first) + s.diagonal + call.window_right + 1);
    }
    if constexpr (HAS_LEFT) {
        range.lo = clamp(static_cast<int64>(first) + s.diagonal - call.window_left);
        range.full_lo = clamp(static_cast<int64>(last) + s.diagonal - call.window_left);
    }
    return range;
}

// Queries that see the keys first..last.
PF_DEVICE Range seeing_queries(const Call& call, const Sequence& s, int first, int last) {
    Range range = {0, s.rows_q, 0, s.rows_q};
    const auto clamp = [&](int64 row) { return static_cast<int>(least(most(row, int64(0)), static_cast<int64>(s.rows_q))); };
    if constexpr (HAS_RIGHT) {
        range.lo = clamp(static_cast<int64>(first) - s.diagonal - call.window_right);
        range.full_lo = clamp(static_cast<int64>(last) - s.diagonal - call.window_right);
    }
    if constexpr (HAS_LEFT) {
        range.hi = clamp(static_cast<int64>(last) - s.diagonal + call.window_left + 1);
        range.full_hi = clamp(static_cast<int64>(first) - s.diagonal + call.window_left + 1);
    }
    return range;
}

// Blocks [begin, end) have something visible; those that start in [inner, inner_end) everything, so that no position is compared.
struct Blocks {
    int begin, end, inner, inner_end;
};

template <int BLOCK>
PF_DEVICE Blocks blocks_of(const Range& range) {
    Blocks b;
    b.begin = range.lo / BLOCK * BLOCK;
    b.end = most(b.begin, (range.hi + BLOCK - 1) / BLOCK * BLOCK);
    b.inner = least(most((range.full_lo + BLOCK - 1) / BLOCK * BLOCK, b.begin), b.end);
    b.inner_end = most(b.inner, least(range.full_hi / BLOCK * BLOCK, b.end));
    return b;
}

// ------------------------------------------------------------------ tensors
PF_DEVICE Rows rows_of(const void* tensor, const Strides3& strides, int64 batch, int64 first, int head, int lo, int hi) {
    const int64 offset = batch * strides.batch + head * strides.head + first * strides.row;
    return {static_cast<const unsigned char*>(tensor) + offset * Element::bytes, strides.row * Element::bytes, lo, hi};
}

PF_DEVICE unsigned char* row_of(void* tensor, const Strides3& strides, int64 batch, int64 row, int head) {
    return static_cast<unsigned char*>(tensor) + (batch * strides.batch + head * strides.head + row * strides.row) * Element::bytes;
}

PF_DEVICE int64 lse_offset(const Call& call, const Sequence& s, int head) {
    return s.batch_q * call.lse_batch + head * call.lse_head + s.first_q;
}

// ------------------------------------------------------------------ logits
// What all logits of one head share. bias and mask point to the head's element (0, 0).
struct Head {
    const unsigned char* bias;
    const uint8* mask;
    float slope;
};

PF_DEVICE Head head_of(const Call& call, const void* bias, const uint8* mask, const float* alibi_slopes, int b, int h) {
    Head head = {nullptr, nullptr, 0.0f};
    if constexpr (HAS_BIAS) head.bias = static_cast<const unsigned char*>(bias) + (b * call.bias.batch + h * call.bias.head) * Bias::bytes;
    if constexpr (HAS_MASK) head.mask = mask + b * call.mask.batch + h * call.mask.head;
    if constexpr (HAS_ALIBI) head.slope = alibi_slopes[b * call.alibi_batch + h * call.alibi_head];
    return head;
}

PF_DEVICE float bias_at(const unsigned char* bias, int64 index) {
    if constexpr (Bias::bytes == 4) return reinterpret_cast<const float*>(bias)[index];
    else return widen<Bias>(reinterpret_cast<const uint16*>(bias)[index]);
}

// Position alone: the only statement of causal and window. The streamed positions that `stays` sees are those in [lo, hi]; reaches
// may be as large as an int, so that sums are in 64 bits.
struct Bounds {
    int lo, hi;
};

template <bool KEYS_STREAM>
PF_DEVICE Bounds bounds_of(const Call& call, const Sequence& s, int stays) {
    const int last = (KEYS_STREAM ? s.rows_k : s.rows_q) - 1;
    const int64 middle = static_cast<int64>(stays) + (KEYS_STREAM ? s.diagonal : -s.diagonal);
    int64 lo = 0, hi = stays < (KEYS_STREAM ? s.rows_q : s.rows_k) ? last : -1;
    if constexpr (KEYS_STREAM ? HAS_LEFT : HAS_RIGHT) lo = most(lo, middle - (KEYS_STREAM ? call.window_left : call.window_right));
    if constexpr (KEYS_STREAM ? HAS_RIGHT : HAS_LEFT) hi = least(hi, middle + (KEYS_STREAM ? call.window_right : call.window_left));
    return {static_cast<int>(least(lo, static_cast<int64>(last) + 1)), static_cast<int>(most(hi, int64(-1)))};
}

constexpr bool MAY_HIDE_NAN = HAS_BIAS || HAS_MASK;  // slots that only a bias or a mask hides are read, and may hold NaN

// Turn the products q . k of one column (in place) into logits in UNIT, -inf where hidden. Register n is position
// streamed + const_row(n) + lane_row() of the streamed side. Returns what is visible as bits of n where a mask or a bias may hide
// NaN; `tanh` receives the cap's values for its derivative. `edge`: position hides something in this tile; the same for all lanes.
template <bool KEYS_STREAM, int R, int TR>
PF_DEVICE uint32 logits(
    float (&s)[R], float (&tanh)[TR], const Call& call, const Sequence& sequence, const Head& head, int streamed, int stays, bool edge) {
    static_assert(!MAY_HIDE_NAN || R <= 32, "one bit for each register");
    const int first = streamed + lane_row();
    const Bounds bounds = bounds_of<KEYS_STREAM>(call, sequence, stays);
    const int lo = bounds.lo - first, hi = bounds.hi - first;  // compared with constants
#pragma unroll
    for (int n = 0; n < R; ++n) {
        if constexpr (HAS_SOFTCAP) {
            const float t = 1.0f - 2.0f / (exp2_of(s[n] * (call.scale * 2.0f * LOG2E / call.softcap)) + 1.0f);
            if constexpr (TR == R) tanh[n] = t;
            s[n] = t * (call.softcap * UNIT);
        } else {
            s[n] = s[n] * (call.scale * UNIT);
        }
        if constexpr (HAS_ALIBI) {  // always bottom-right, like the formula in the documentation
            const int query = KEYS_STREAM ? stays : first + const_row(n), key = KEYS_STREAM ? first + const_row(n) : stays;
            const int distance = query + (sequence.rows_k - sequence.rows_q) - key;
            s[n] = s[n] - head.slope * UNIT * static_cast<float>(distance < 0 ? -distance : distance);
        }
    }
    uint32 seen = 0;
    if constexpr (MAY_HIDE_NAN) {
#pragma unroll
        for (int n = 0; n < R; ++n) {
            const int query = KEYS_STREAM ? stays : first + const_row(n), key = KEYS_STREAM ? first + const_row(n) : stays;
            bool ok = const_row(n) >= lo && const_row(n) <= hi;
            // Loads without a branch, which would part the products from their operands: positions past the tensor's own size
            // (a wrong max_seqlen) are hidden, and read its last row or column instead.
            if constexpr (HAS_MASK) {
                const int row = least(query, call.mask_rows - 1), column = least(key, call.mask_columns - 1);
                const bool allowed = head.mask[row * call.mask.row + column * call.mask.column] != 0;
                ok = ok & (query == row) & (key == column) & allowed;
            }
            if constexpr (HAS_BIAS) {
                const int row = least(query, call.bias_rows - 1), column = least(key, call.bias_columns - 1);
                const float bias = bias_at(head.bias, row * call.bias.row + column * call.bias.column);
                ok = ok & (query == row) & (key == column) & (bias > -INFINITE);
                // a finite bias is never a mask: what overflows float32 is held at its ends
                s[n] = max_of(min_of(s[n] + bias * UNIT, FLOAT32_MAX), -FLOAT32_MAX);
            }
            s[n] = ok ? s[n] : -INFINITE;
            seen |= static_cast<uint32>(ok) << n;
            if (SCARCE && n % 2 == 1) schedule_fence();
        }
    } else {
        if (edge) {
#pragma unroll
            for (int n = 0; n < R; ++n) {
                bool ok = true;
                if constexpr (KEYS_STREAM ? HAS_LEFT : HAS_RIGHT) ok = const_row(n) >= lo;
                if constexpr (KEYS_STREAM || HAS_LEFT) ok = ok && const_row(n) <= hi;  // queries past the end have lse = +inf
                s[n] = ok ? s[n] : -INFINITE;
            }
        }
    }
    return seen;
}

PF_DEVICE float exp_of(float x) { return exp2_of(IS_FLOAT32 ? x * LOG2E : x); }
