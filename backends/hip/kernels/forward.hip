// Forward: blocked online softmax (FlashAttention, Dao et al. 2022, Algorithm 1; FlashAttention-2's loop order).
// One program: BLOCK_M rows of one query head against all keys that they see. S^T and O^T are computed, see matrix.h.
#include "config.h"
#include "matrix.h"
#include "blocks.h"
#include "scores.h"

constexpr int WIDTH = (HEAD_DIM + 31) / 32 * 32, WIDTH_V = (HEAD_DIM_V + 31) / 32 * 32;
using Queries = Stationary<BLOCK_M, WIDTH, HEAD_DIM, STATIONARY_IN_LDS>;
using Keys = Stream<BLOCK_N, WIDTH, HEAD_DIM>;
using Values = Stream<BLOCK_N, WIDTH_V, HEAD_DIM_V>;
constexpr int NT = Queries::NT, R = BLOCK_N / SIDE * ACC;

PF_KERNEL(THREADS) void forward(PF_ARGUMENTS) {
    PF_SHARED(Queries::BYTES + STAGES * (Keys::BYTES + Values::BYTES));
    const Program program = program_of(call, HAS_RIGHT);
    const int b = program.head / call.heads_q, h = program.head - b * call.heads_q, hk = h / call.group;
    const int m_start = program.block * BLOCK_M;
    const Sequence sequence = sequence_of(call, cu_seqlens_q, cu_seqlens_k, b);
    if (VARLEN && m_start >= sequence.rows_q) return;
    const int m_last = least(m_start + BLOCK_M, sequence.rows_q) - 1;
    const Blocks blocks = blocks_of<BLOCK_N>(seen_keys(call, sequence, m_start, m_last));
    const Range keys_seen = seen_keys(call, sequence, 0, sequence.rows_q - 1);  // what no query sees is never read: it may hold NaN
    const Rows q_rows = rows_of(query, call.query, sequence.batch_q, sequence.first_q, h, 0, sequence.rows_q);
    const Rows k_rows = rows_of(key, call.key, sequence.batch_k, sequence.first_k, hk, keys_seen.lo, keys_seen.hi);
    const Rows v_rows = rows_of(value, call.value, sequence.batch_k, sequence.first_k, hk, keys_seen.lo, keys_seen.hi);
    const Head head = head_of(call, bias, mask, alibi_slopes, b, h);
    const int wave = uniform(thread_index() / WAVE);

    Queries q;
    q.load(shared_memory, q_rows, m_start, wave);
    Accumulator o[NT][WIDTH_V / SIDE];
    float m[NT], l[NT];  // l: this lane's share of the sum
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int t = 0; t < WIDTH_V / SIDE; ++t) o[n][t] = Accumulator{};
        m[n] = HAS_SINKS ? sinks[h] * UNIT : -INFINITE;  // a sink is one more logit in the denominator, with no value
        l[n] = HAS_SINKS && m[n] != -INFINITE && lane_group() == 0 ? 1.0f : 0.0f;
    }

    Keys keys;
    Values values;
    if (PREFETCH && blocks.begin < blocks.end) {
        keys.fetch(k_rows, blocks.begin);
        values.fetch(v_rows, blocks.begin);
    }
    int stage = 0;
    for (int n_start = blocks.begin; n_start < blocks.end; n_start += BLOCK_N) {
        unsigned char* buffer = shared_memory + Queries::BYTES + stage * (Keys::BYTES + Values::BYTES);
        const Tile<WIDTH> k = {buffer};
        const Tile<WIDTH_V> v = {buffer + Keys::BYTES};
        if (STAGES == 1) barrier();  // the previous block has been read by all
        if constexpr (PREFETCH) {
            keys.put(k);
            values.put(v);
        } else {
            copy_rows<BLOCK_N, WIDTH, HEAD_DIM>(k, k_rows, n_start);
            copy_rows<BLOCK_N, WIDTH_V, HEAD_DIM_V>(v, v_rows, n_start);
        }
        barrier();
        if (PREFETCH && n_start + BLOCK_N < blocks.end) {
            keys.fetch(k_rows, n_start + BLOCK_N);
            values.fetch(v_rows, n_start + BLOCK_N);
        }

        Accumulator products_of[NT][BLOCK_N / SIDE];
        products(products_of, k, q, wave);
        const bool edge = n_start < blocks.inner || n_start >= blocks.inner_end;
        float s[NT][R], unused[1];
        uint32 seen = 0;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int row = m_start + (wave * NT + n) * SIDE + lane_column();
#pragma unroll
            for (int i = 0; i < R; ++i) s[n][i] = products_of[n][i / ACC].data[i % ACC];
            seen |= logits<true>(s[n], unused, call, sequence, head, n_start, row, edge);
            float highest = s[n][0];
#pragma unroll
            for (int i = 1; i < R; ++i) highest = max_of(highest, s[n][i]);
            highest = over_groups(highest, [](float x, float y) { return max_of(x, y); });
            const float m_new = max_of(m[n], highest);
            const float m_safe = m_new == -INFINITE ? 0.0f : m_new;  // a row that has seen nothing yet: -inf - -inf is NaN
            const float alpha = exp_of(m[n] - m_safe);
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < R; ++i) {
                s[n][i] = exp_of(s[n][i] - m_safe);
                sum += s[n][i];
            }
            l[n] = l[n] * alpha + sum;
            const bool grew = m_new > m[n];
            m[n] = m_new;
            if (any_lane(grew)) {  // otherwise alpha is 1 in every lane
#pragma unroll
                for (int t = 0; t < WIDTH_V / SIDE; ++t) {
#pragma unroll
                    for (int i = 0; i < ACC; ++i) o[n][t].data[i] *= alpha;
                }
            }
        }
        accumulate(o, v, s, MAY_HIDE_NAN, MAY_HIDE_NAN ? any_column(seen) : 0);
        if (STAGES > 1) stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int row = m_start + (wave * NT + n) * SIDE + lane_column();
        const float sum = over_groups(l[n], [](float x, float y) { return x + y; });
        const bool empty = sum == 0.0f;
        if (row >= sequence.rows_q) continue;
        store_row<HEAD_DIM_V>(row_of(out, call.out, sequence.batch_q, sequence.first_q + row, h), o[n], empty ? 0.0f : 1.0f / sum);
        if (lane_group() == 0) lse[lse_offset(call, sequence, h) + row] = empty ? -INFINITE : m[n] / UNIT + log2_of(sum) * LN2;
    }
}
