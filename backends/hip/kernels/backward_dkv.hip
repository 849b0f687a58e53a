// dK and dV. One program: BLOCK_N keys of one key/value head against all queries, of all heads of its group, that see them.
// The mathematics is in gradients.h; S = Q K^T and dP = dO V^T are computed with a key a lane, see matrix.h.
#include "config.h"
#include "matrix.h"
#include "blocks.h"
#include "scores.h"
#include "gradients.h"

constexpr int WIDTH = (HEAD_DIM + 31) / 32 * 32, WIDTH_V = (HEAD_DIM_V + 31) / 32 * 32;
using Keys = Stationary<BLOCK_N, WIDTH, HEAD_DIM, STATIONARY_IN_LDS>;
using Values = Stationary<BLOCK_N, WIDTH_V, HEAD_DIM_V, STATIONARY_IN_LDS>;
using Queries = Stream<BLOCK_M, WIDTH, HEAD_DIM>;
using Gradients = Stream<BLOCK_M, WIDTH_V, HEAD_DIM_V>;
constexpr int NT = Keys::NT, R = BLOCK_M / SIDE * ACC;
// lse and delta of a block's rows go through LDS too, except where rows are so long that the tiles fill it to the last byte.
constexpr bool STATS_IN_LDS = (WIDTH + WIDTH_V) * Element::bytes < 2048;
constexpr int STAT_SHARE = (BLOCK_M + THREADS - 1) / THREADS;  // rows of a block whose lse and delta a work-item brings in
constexpr int STAGE = Queries::BYTES + Gradients::BYTES + (STATS_IN_LDS ? 2 * BLOCK_M * 4 : 0);

PF_KERNEL(THREADS) void backward_dkv(PF_ARGUMENTS) {
    PF_SHARED(Keys::BYTES + (NEED_DK ? Values::BYTES : 0) + STAGES * STAGE);
    const Program program = program_of(call, false);
    const int b = program.head / call.heads_k, hk = program.head - b * call.heads_k;
    const int n_start = program.block * BLOCK_N;
    const Sequence sequence = sequence_of(call, cu_seqlens_q, cu_seqlens_k, b);
    if (VARLEN && n_start >= sequence.rows_k) return;
    const int n_last = least(n_start + BLOCK_N, sequence.rows_k) - 1;
    Blocks blocks = blocks_of<BLOCK_M>(seeing_queries(call, sequence, n_start, n_last));
    if constexpr (!HAS_LEFT) blocks.inner_end = blocks.end;  // rows past the end have lse = +inf: the last block hides nothing
    // slots that no query sees, and queries that see nothing, are never read: they may hold NaN
    const Range queries_seeing = seeing_queries(call, sequence, 0, sequence.rows_k - 1);
    const Range keys_seen = seen_keys(call, sequence, 0, sequence.rows_q - 1);
    const Rows k_rows = rows_of(key, call.key, sequence.batch_k, sequence.first_k, hk, keys_seen.lo, keys_seen.hi);
    const Rows v_rows = rows_of(value, call.value, sequence.batch_k, sequence.first_k, hk, keys_seen.lo, keys_seen.hi);
    const int wave = uniform(thread_index() / WAVE);

    Keys k;
    Values v;
    k.load(shared_memory, k_rows, n_start, wave);
    if constexpr (NEED_DK) v.load(shared_memory + Keys::BYTES, v_rows, n_start, wave);
    Accumulator dk[NT][WIDTH / SIDE], dv[NT][WIDTH_V / SIDE];  // what is not needed is never used, and dropped by the compiler
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int t = 0; t < WIDTH / SIDE; ++t) dk[n][t] = Accumulator{};
#pragma unroll
        for (int t = 0; t < WIDTH_V / SIDE; ++t) dv[n][t] = Accumulator{};
    }

    Queries queries;
    Gradients gradients;
    float row_lse[STAT_SHARE] = {}, row_delta[STAT_SHARE] = {};
    const auto queries_of = [&](int h) {
        return rows_of(query, call.query, sequence.batch_q, sequence.first_q, h, queries_seeing.lo, queries_seeing.hi);
    };
    const auto gradients_of = [&](int h) {
        return rows_of(grad_out, call.grad_out, sequence.batch_q, sequence.first_q, h, queries_seeing.lo, queries_seeing.hi);
    };
    const auto fetch = [&](int h, int m_start) {
        if constexpr (PREFETCH) {
            queries.fetch(queries_of(h), m_start);
            gradients.fetch(gradients_of(h), m_start);
        }
        const int64 at = lse_offset(call, sequence, h);
#pragma unroll
        for (int i = 0; i < (STATS_IN_LDS ? STAT_SHARE : 0); ++i) {
            const int row = m_start + thread_index() + i * THREADS;
            if (thread_index() + i * THREADS >= BLOCK_M) continue;
            row_lse[i] = lse_or_infinite(lse + at, row, sequence.rows_q);
            if constexpr (NEED_DK) row_delta[i] = delta_or_zero(delta + at, row, sequence.rows_q);
        }
    };
    // The blocks of all heads of the group are one sequence of steps, so that loads run ahead over the heads' borders too.
    const int per_head = (blocks.end - blocks.begin) / BLOCK_M, steps = per_head * call.group;
    if (steps > 0) fetch(hk * call.group, blocks.begin);
    int stage = 0, h = hk * call.group, m_start = blocks.begin;
    for (int step = 0; step < steps; ++step) {
        unsigned char* buffer = shared_memory + Keys::BYTES + (NEED_DK ? Values::BYTES : 0) + stage * STAGE;
        const Tile<WIDTH> q = {buffer};
        const Tile<WIDTH_V> grad = {buffer + Queries::BYTES};
        float* stats = reinterpret_cast<float*>(buffer + Queries::BYTES + Gradients::BYTES);
        if (STAGES == 1) barrier();  // the previous block has been read by all
        if constexpr (PREFETCH) {
            queries.put(q);
            gradients.put(grad);
        } else {
            copy_rows<BLOCK_M, WIDTH, HEAD_DIM>(q, queries_of(h), m_start);
            copy_rows<BLOCK_M, WIDTH_V, HEAD_DIM_V>(grad, gradients_of(h), m_start);
        }
#pragma unroll
        for (int i = 0; i < (STATS_IN_LDS ? STAT_SHARE : 0); ++i) {
            const int row = thread_index() + i * THREADS;
            if (row >= BLOCK_M) continue;
            stats[row] = row_lse[i];
            if constexpr (NEED_DK) stats[BLOCK_M + row] = row_delta[i];
        }
        barrier();
        const int next_m = m_start + BLOCK_M < blocks.end ? m_start + BLOCK_M : blocks.begin;
        const int next_h = next_m == blocks.begin ? h + 1 : h;
        if (step + 1 < steps) fetch(next_h, next_m);

        const int64 at = lse_offset(call, sequence, h);
        const int first_row = m_start + lane_row();
        const auto lse_of = [&](int i) {
            if constexpr (STATS_IN_LDS) return stats[const_row(i) + lane_row()];
            else return lse_or_infinite(lse + at, first_row + const_row(i), sequence.rows_q);
        };
        const auto delta_of = [&](int i) {
            if constexpr (STATS_IN_LDS) return stats[BLOCK_M + const_row(i) + lane_row()];
            else return delta_or_zero(delta + at, first_row + const_row(i), sequence.rows_q);
        };
        const Head head = head_of(call, bias, mask, alibi_slopes, b, h);
        const bool edge = m_start < blocks.inner || m_start >= blocks.inner_end;
        Accumulator tiles[NT][BLOCK_M / SIDE];
        float p[NT][R], tanh[NT][HAS_SOFTCAP ? R : 1];
        uint32 ok[NT], seen = 0;
        products(tiles, q, k, wave);
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int key_position = n_start + (wave * NT + n) * SIDE + lane_column();
#pragma unroll
            for (int i = 0; i < R; ++i) p[n][i] = tiles[n][i / ACC].data[i % ACC];
            ok[n] = logits<false>(p[n], tanh[n], call, sequence, head, m_start, key_position, edge);
            seen |= ok[n];
#pragma unroll
            for (int i = 0; i < R; ++i) p[n][i] = probability(p[n][i], lse_of(i));
        }
        if constexpr (MAY_HIDE_NAN) seen = any_column(seen);  // queries that see nothing here may hold NaN, and 0 * NaN is NaN
        if constexpr (NEED_DK) products(tiles, grad, v, wave);
        if constexpr (NEED_DV) {
            float scaled[NT][R];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int i = 0; i < R; ++i) scaled[n][i] = P_FACTOR == 1.0f ? p[n][i] : p[n][i] * P_FACTOR;
            }
            accumulate(dv, grad, scaled, MAY_HIDE_NAN, seen);
        }
        if constexpr (NEED_DK) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int i = 0; i < R; ++i) {
                    float ds = p[n][i] * (tiles[n][i / ACC].data[i % ACC] - delta_of(i));
                    if constexpr (HAS_SOFTCAP) ds *= 1.0f - tanh[n][i] * tanh[n][i];
                    if constexpr (MAY_HIDE_NAN) ds = ok[n] >> i & 1u ? ds : 0.0f;
                    p[n][i] = ds;
                }
            }
            accumulate(dk, q, p, MAY_HIDE_NAN, seen);
        }
        h = next_h;
        m_start = next_m;
        if (STAGES > 1) stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const int row = n_start + (wave * NT + n) * SIDE + lane_column();
        if (row >= sequence.rows_k) continue;
        if constexpr (NEED_DK) store_row<HEAD_DIM>(row_of(dkey, call.dkey, sequence.batch_k, sequence.first_k + row, hk), dk[n], call.scale);
        if constexpr (NEED_DV)
            store_row<HEAD_DIM_V>(row_of(dvalue, call.dvalue, sequence.batch_k, sequence.first_k + row, hk), dv[n], 1.0f / P_FACTOR);
    }
}
