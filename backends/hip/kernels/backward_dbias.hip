// The bias gradient. One program: one tile of bias, BLOCK_M rows by BLOCK_N columns, dS summed over the dimensions along which bias
// is broadcast (SUM_*). The mathematics is in gradients.h; everything comes from LDS, which is simple and not fast.
#include "config.h"
#include "matrix.h"
#include "blocks.h"
#include "scores.h"
#include "gradients.h"

constexpr int WIDTH = (HEAD_DIM + 31) / 32 * 32, WIDTH_V = (HEAD_DIM_V + 31) / 32 * 32;
using Queries = Stationary<BLOCK_M, WIDTH, HEAD_DIM, true>;
using Gradients = Stationary<BLOCK_M, WIDTH_V, HEAD_DIM_V, true>;
using Keys = Stationary<BLOCK_N, WIDTH, HEAD_DIM, true>;  // not owned by waves: only a tile that all bring in
using Values = Stationary<BLOCK_N, WIDTH_V, HEAD_DIM_V, true>;
constexpr int NT = Queries::NT, R = BLOCK_N / SIDE * ACC;
constexpr int OPERANDS = Queries::BYTES + Gradients::BYTES + Keys::BYTES + Values::BYTES;
constexpr int SCORES = SUM_ROWS || SUM_COLUMNS ? BLOCK_M * BLOCK_N * 4 : 0;  // takes the operands' place at the end

PF_KERNEL(THREADS) void backward_dbias(PF_ARGUMENTS) {
    PF_SHARED(most(OPERANDS, SCORES));
    const int tile_n = program_index() % call.n_tiles, tile_m = program_index() / call.n_tiles % call.m_tiles;
    const int bias_bh = program_index() / call.n_tiles / call.m_tiles;
    const int bias_b = bias_bh / call.bias_heads, bias_h = bias_bh % call.bias_heads;
    const int wave = uniform(thread_index() / WAVE);
    float sum[NT][R];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < R; ++i) sum[n][i] = 0.0f;
    }
    Queries q;
    Gradients grad;
    Keys k;
    Values v;
    for (int i = 0; i < (SUM_BATCH ? call.batch : 1); ++i) {  // where bias is broadcast its own index is 0
        const int b = bias_b + i;
        const Sequence sequence = sequence_of(call, cu_seqlens_q, cu_seqlens_k, b);
        const int n_end = SUM_COLUMNS ? sequence.rows_k : least((tile_n + 1) * BLOCK_N, sequence.rows_k);
        for (int n_start = tile_n * BLOCK_N; n_start < n_end; n_start += BLOCK_N) {
            const Range range = seeing_queries(call, sequence, n_start, least(n_start + BLOCK_N, sequence.rows_k) - 1);
            const int m_begin = most(range.lo / BLOCK_M * BLOCK_M, SUM_ROWS ? 0 : tile_m * BLOCK_M);
            const int m_end = SUM_ROWS ? range.hi : least(range.hi, (tile_m + 1) * BLOCK_M);
            for (int j = 0; j < (SUM_HEADS ? call.heads_q : 1); ++j) {
                const int h = bias_h + j, hk = h / call.group;
                const Head head = head_of(call, bias, mask, alibi_slopes, b, h);
                const int64 at = lse_offset(call, sequence, h);
                for (int m_start = m_begin; m_start < m_end; m_start += BLOCK_M) {
                    barrier();  // the previous tiles have been read by all
                    q.load(shared_memory, rows_of(query, call.query, sequence.batch_q, sequence.first_q, h, 0, sequence.rows_q), m_start, wave);
                    grad.load(
                        shared_memory + Queries::BYTES,
                        rows_of(grad_out, call.grad_out, sequence.batch_q, sequence.first_q, h, 0, sequence.rows_q), m_start, wave);
                    k.load(
                        shared_memory + Queries::BYTES + Gradients::BYTES,
                        rows_of(key, call.key, sequence.batch_k, sequence.first_k, hk, 0, sequence.rows_k), n_start, wave);
                    v.load(
                        shared_memory + Queries::BYTES + Gradients::BYTES + Keys::BYTES,
                        rows_of(value, call.value, sequence.batch_k, sequence.first_k, hk, 0, sequence.rows_k), n_start, wave);
                    barrier();
                    Accumulator s_tiles[NT][BLOCK_N / SIDE], dp_tiles[NT][BLOCK_N / SIDE];
                    products(s_tiles, k.tile, q, wave);
                    products(dp_tiles, v.tile, grad, wave);
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        const int row = m_start + (wave * NT + n) * SIDE + lane_column();
                        float s[R], unused[1];
#pragma unroll
                        for (int r = 0; r < R; ++r) s[r] = s_tiles[n][r / ACC].data[r % ACC];
                        const uint32 ok = logits<true>(s, unused, call, sequence, head, n_start, row, true);
                        const float row_lse = lse_or_infinite(lse + at, row, sequence.rows_q);
                        const float row_delta = delta_or_zero(delta + at, row, sequence.rows_q);
#pragma unroll
                        for (int r = 0; r < R; ++r) {
                            const float ds = probability(s[r], row_lse) * (dp_tiles[n][r / ACC].data[r % ACC] - row_delta);
                            sum[n][r] += ok >> r & 1u ? ds : 0.0f;
                        }
                    }
                }
            }
        }
    }

    float* tile = dbias + bias_b * call.dbias.batch + bias_h * call.dbias.head;
    if constexpr (!SUM_ROWS && !SUM_COLUMNS) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int row = tile_m * BLOCK_M + (wave * NT + n) * SIDE + lane_column();
#pragma unroll
            for (int r = 0; r < R; ++r) {
                const int column = tile_n * BLOCK_N + const_row(r) + lane_row();
                if (row < call.bias_rows && column < call.bias_columns) tile[row * call.dbias.row + column * call.dbias.column] = sum[n][r];
            }
        }
        return;
    }
    // Sums along a dimension: through LDS, in the order of the positions, so that they are the same every time.
    float* scores = reinterpret_cast<float*>(shared_memory);
    barrier();
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int r = 0; r < R; ++r)
            scores[((wave * NT + n) * SIDE + lane_column()) * BLOCK_N + const_row(r) + lane_row()] = sum[n][r];
    }
    barrier();
    const int count = SUM_COLUMNS && SUM_ROWS ? 1 : SUM_COLUMNS ? BLOCK_M : BLOCK_N;
    for (int i = thread_index(); i < count; i += THREADS) {
        float total = 0.0f;
        for (int row = SUM_ROWS ? 0 : i; row < (SUM_ROWS ? BLOCK_M : i + 1); ++row)
            for (int column = SUM_COLUMNS ? 0 : i; column < (SUM_COLUMNS ? BLOCK_N : i + 1); ++column) total += scores[row * BLOCK_N + column];
        const int row = SUM_ROWS ? 0 : tile_m * BLOCK_M + i, column = SUM_COLUMNS ? 0 : tile_n * BLOCK_N + i;
        if (row < call.bias_rows && column < call.bias_columns) tile[row * call.dbias.row + column * call.dbias.column] = total;
    }
}
