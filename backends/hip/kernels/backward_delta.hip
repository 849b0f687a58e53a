// delta_i = sum_d dO_id O_id - dlse_i (FlashAttention, Dao et al. 2022, Algorithm 4, line 3). One program: BLOCK_M rows of one
// head, THREADS / BLOCK_M work-items a row. Packed tensors are one sequence here.
#include "config.h"
#include "matrix.h"
#include "blocks.h"
#include "scores.h"

constexpr int SHARERS = THREADS / BLOCK_M;
static_assert(SHARERS == 4, "four work-items a row");

// Rows that see no key get 0, whatever their gradients hold (even NaN).
PF_KERNEL(THREADS) void backward_delta(PF_ARGUMENTS) {
    const int bh = program_index() / call.num_blocks, block = program_index() - bh * call.num_blocks;
    const int b = bh / call.heads_q, h = bh - b * call.heads_q;
    const int row = block * BLOCK_M + thread_index() / SHARERS, part = thread_index() % SHARERS;
    const bool inside = row < call.seqlen_q;
    const unsigned char* o = row_of(out, call.out, b, row, h);
    const unsigned char* grad = row_of(const_cast<void*>(grad_out), call.grad_out, b, row, h);
    constexpr int COUNT = 16 / Element::bytes;
    float sum = 0.0f;
    for (int column = part * COUNT; column < HEAD_DIM_V; column += SHARERS * COUNT) {
        const auto x = read_piece<HEAD_DIM_V>(o, column, inside), y = read_piece<HEAD_DIM_V>(grad, column, inside);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            float a, c;
            if constexpr (IS_FLOAT32) {
                a = as_float(x.data[i]);
                c = as_float(y.data[i]);
            } else {
                a = widen<Element>(static_cast<uint16>(x.data[i / 2] >> (i % 2 * 16)));
                c = widen<Element>(static_cast<uint16>(y.data[i / 2] >> (i % 2 * 16)));
            }
            // where O is 0 the product is: a row that sees nothing but a sink has O = 0, and a gradient that may be NaN
            sum += a == 0.0f ? 0.0f : a * c;
        }
    }
    sum += as_float(lane_xor<1>(as_uint(sum)));
    sum += as_float(lane_xor<2>(as_uint(sum)));
    if (!inside || part != 0) return;
    if constexpr (HAS_GRAD_LSE) sum -= grad_lse[b * call.grad_lse.batch + h * call.grad_lse.head + row * call.grad_lse.row];
    const int64 at = b * call.lse_batch + h * call.lse_head + row;
    delta[at] = lse[at] == -INFINITE ? 0.0f : sum;
}
