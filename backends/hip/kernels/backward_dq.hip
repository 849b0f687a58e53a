// dQ. One program: BLOCK_M rows of one query head against all keys that they see. The mathematics is in gradients.h.
// Keys past the end are loaded as 0 and add nothing to dQ: only the window hides.
#include "config.h"
#include "matrix.h"
#include "blocks.h"
#include "scores.h"
#include "gradients.h"

constexpr int WIDTH = (HEAD_DIM + 31) / 32 * 32, WIDTH_V = (HEAD_DIM_V + 31) / 32 * 32;
using Queries = Stationary<BLOCK_M, WIDTH, HEAD_DIM, STATIONARY_IN_LDS>;
using Gradients = Stationary<BLOCK_M, WIDTH_V, HEAD_DIM_V, STATIONARY_IN_LDS>;
using Keys = Stream<BLOCK_N, WIDTH, HEAD_DIM>;
using Values = Stream<BLOCK_N, WIDTH_V, HEAD_DIM_V>;
constexpr int NT = Queries::NT, R = BLOCK_N / SIDE * ACC;

PF_KERNEL(THREADS) void backward_dq(PF_ARGUMENTS) {
    PF_SHARED(Queries::BYTES + Gradients::BYTES + STAGES * (Keys::BYTES + Values::BYTES));
    const Program program = program_of(call, HAS_RIGHT);
    const int b = program.head / call.heads_q, h = program.head - b * call.heads_q, hk = h / call.group;
    const int m_start = program.block * BLOCK_M;
    const Sequence sequence = sequence_of(call, cu_seqlens_q, cu_seqlens_k, b);
    if (VARLEN && m_start >= sequence.rows_q) return;
    const int m_last = least(m_start + BLOCK_M, sequence.rows_q) - 1;
    const Blocks blocks = blocks_of<BLOCK_N>(seen_keys(call, sequence, m_start, m_last));
    const Range keys_seen = seen_keys(call, sequence, 0, sequence.rows_q - 1);
    const Range queries_seeing = seeing_queries(call, sequence, 0, sequence.rows_k - 1);
    const Rows k_rows = rows_of(key, call.key, sequence.batch_k, sequence.first_k, hk, keys_seen.lo, keys_seen.hi);
    const Rows v_rows = rows_of(value, call.value, sequence.batch_k, sequence.first_k, hk, keys_seen.lo, keys_seen.hi);
    const Head head = head_of(call, bias, mask, alibi_slopes, b, h);
    const int wave = uniform(thread_index() / WAVE);

    Queries q;
    Gradients grad;
    q.load(shared_memory, rows_of(query, call.query, sequence.batch_q, sequence.first_q, h, queries_seeing.lo, queries_seeing.hi), m_start, wave);
    grad.load(
        shared_memory + Queries::BYTES,
        rows_of(grad_out, call.grad_out, sequence.batch_q, sequence.first_q, h, queries_seeing.lo, queries_seeing.hi), m_start, wave);
    Accumulator dq[NT][WIDTH / SIDE];
    float row_lse[NT], row_delta[NT];
    const int64 at = lse_offset(call, sequence, h);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int t = 0; t < WIDTH / SIDE; ++t) dq[n][t] = Accumulator{};
        const int row = m_start + (wave * NT + n) * SIDE + lane_column();
        row_lse[n] = lse_or_infinite(lse + at, row, sequence.rows_q);
        row_delta[n] = delta_or_zero(delta + at, row, sequence.rows_q);
    }

    Keys keys;
    Values values;
    if (PREFETCH && blocks.begin < blocks.end) {
        keys.fetch(k_rows, blocks.begin);
        values.fetch(v_rows, blocks.begin);
    }
    int stage = 0;
    for (int n_start = blocks.begin; n_start < blocks.end; n_start += BLOCK_N) {
        unsigned char* buffer = shared_memory + Queries::BYTES + Gradients::BYTES + stage * (Keys::BYTES + Values::BYTES);
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

        const bool edge = n_start < blocks.inner || n_start >= blocks.inner_end;
        Accumulator tiles[NT][BLOCK_N / SIDE];
        float p[NT][R], tanh[NT][HAS_SOFTCAP ? R : 1];
        uint32 ok[NT], seen = 0;
        products(tiles, k, q, wave);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int row = m_start + (wave * NT + n) * SIDE + lane_column();
#pragma unroll
            for (int i = 0; i < R; ++i) p[n][i] = tiles[n][i / ACC].data[i % ACC];
            ok[n] = logits<true>(p[n], tanh[n], call, sequence, head, n_start, row, edge);
            seen |= ok[n];
        }
        products(tiles, v, grad, wave);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int i = 0; i < R; ++i) {
                float ds = probability(p[n][i], row_lse[n]) * (tiles[n][i / ACC].data[i % ACC] - row_delta[n]);
                if constexpr (HAS_SOFTCAP) ds *= 1.0f - tanh[n][i] * tanh[n][i];
                if constexpr (MAY_HIDE_NAN) ds = ok[n] >> i & 1u ? ds : 0.0f;
                p[n][i] = ds;
            }
        }
        accumulate(dq, k, p, MAY_HIDE_NAN, MAY_HIDE_NAN ? any_column(seen) : 0);
        if (STAGES > 1) stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int row = m_start + (wave * NT + n) * SIDE + lane_column();
        if (row < sequence.rows_q)
            store_row<HEAD_DIM>(row_of(dquery, call.dquery, sequence.batch_q, sequence.first_q + row, h), dq[n], call.scale);
    }
}
