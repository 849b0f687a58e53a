// The specialisation of one kernel: macros from `specialise.py` (a Tiling, a Problem and an arch) as named constants.
#pragma once

// Matrix layers, values of PF_MATRIX.
#define PF_MATRIX_FMA 0     // fused multiply-add and dot instructions, wave 32 or 64: any GPU
#define PF_MATRIX_MFMA 1    // CDNA, wave 64
#define PF_MATRIX_WMMA11 2  // RDNA 3, wave 32
#define PF_MATRIX_WMMA12 3  // RDNA 4, wave 32

#include "platform.h"

using Element = PF_DTYPE;                      // Float16, BFloat16 or Float32: query, key, value, output and their gradients
constexpr int WAVE = PF_WAVE;                  // lanes of a wave
constexpr int WAVES = PF_WAVES;                // waves of a workgroup (Tiling.num_warps)
constexpr int THREADS = WAVE * WAVES;
constexpr int MFMA_DWORDS = PF_MFMA_DWORDS;    // of an operand of one MFMA: 4 (gfx950, 16-bit), 2 (16-bit), 1 (gfx908 bfloat16; float32)
constexpr int SIDE = PF_SIDE;                  // rows and columns of one accumulator tile: 16, or 32 with MFMA
constexpr int BLOCK_M = PF_BLOCK_M;            // queries of a block
constexpr int BLOCK_N = PF_BLOCK_N;            // keys of a block
constexpr int STAGES = PF_STAGES;              // LDS buffers of the streamed tiles
constexpr int HEAD_DIM = PF_HEAD_DIM;
constexpr int HEAD_DIM_V = PF_HEAD_DIM_V;
constexpr int NUM_XCDS = PF_XCDS;              // chiplets that workgroups are dealt to in turn
constexpr bool STATIONARY_IN_LDS = PF_STATIONARY_IN_LDS;  // the block that stays: operands from LDS, or held in registers
// Where registers are scarce the compiler is held back from starting many loads early. Plain arithmetic reads so much of a tile for each
// step that it is so there always.
constexpr bool SCARCE = STATIONARY_IN_LDS || PF_MATRIX == PF_MATRIX_FMA;
constexpr bool PREFETCH = PF_PREFETCH;         // the next streamed tile is under way in registers while this one is computed with
constexpr bool WIDE_LOADS = PF_WIDE_LOADS;     // rows of 16-bit or 32-bit elements may be read and written 16 bytes at a time

constexpr bool HAS_LEFT = PF_HAS_LEFT;         // the window is bounded on that side (causal: right reach 0)
constexpr bool HAS_RIGHT = PF_HAS_RIGHT;
constexpr bool TOP_LEFT = PF_TOP_LEFT;         // the diagonal starts at key 0 rather than at key seqlen_k - seqlen_q
constexpr bool VARLEN = PF_VARLEN;             // packed sequences, bounds in cu_seqlens_q and cu_seqlens_k
constexpr bool HAS_BIAS = PF_HAS_BIAS;
constexpr bool HAS_MASK = PF_HAS_MASK;
constexpr bool HAS_ALIBI = PF_HAS_ALIBI;
constexpr bool HAS_SOFTCAP = PF_HAS_SOFTCAP;
constexpr bool HAS_SINKS = PF_HAS_SINKS;
constexpr bool HAS_GRAD_LSE = PF_HAS_GRAD_LSE;
constexpr bool NEED_DK = PF_NEED_DK;
constexpr bool NEED_DV = PF_NEED_DV;
constexpr bool SUM_BATCH = PF_SUM_BATCH, SUM_HEADS = PF_SUM_HEADS;  // dimensions along which bias is broadcast
constexpr bool SUM_ROWS = PF_SUM_ROWS, SUM_COLUMNS = PF_SUM_COLUMNS;
using Bias = PF_BIAS_DTYPE;                    // Float16, BFloat16 or Float32
using Index = PF_INDEX;                        // int32 or int64: of cu_seqlens

// Unit of the logits inside the kernels: log2 e, so that exp is the hardware's exp2 at no cost, or 1 for float32 inputs,
// where the rounding of large logits in the other unit would show. Logits are a rounded multiplication followed by a
// subtraction, never one fused multiply-add: with a fused one the maximum's own exponent is a rounding residue that grows
// with the logit, and huge logits overflow. The compilers are told not to contract.
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LN2 = 0.6931471805599453f;
constexpr bool IS_FLOAT32 = Element::bytes == 4;
constexpr float UNIT = IS_FLOAT32 ? 1.0f : LOG2E;
#ifndef INFINITE  // a machine may have to say it in its own way
constexpr float INFINITE = __builtin_huge_valf();
#endif
constexpr float FLOAT32_MAX = 3.4028234663852886e38f;

#include "call.h"
