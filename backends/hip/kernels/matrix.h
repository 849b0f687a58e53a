// Matrix products over a few lanes' layouts, one interface for all: the layer that PF_MATRIX selects.
//
// Every product of attention has one block that stays (its rows are the columns of an accumulator, so that a lane owns one
// of them) and one that streams through LDS:
//   S^T = K Q^T     add_rows:     accumulator rows are streamed rows, the contraction runs over features
//   O^T += V^T P^T  add_columns:  accumulator rows are features, the contraction runs over streamed rows
// and likewise dP^T = V dO^T, dQ^T += K^T dS^T (keys stream) and S = Q K^T, dV^T += dO^T P, dK^T += Q^T dS (queries stream).
// The accumulator of S^T already lies in its lanes as the second operand of the next product, give or take a swap between
// half waves (RDNA 3): P and dS never leave the registers.
//
//   SIDE     rows and columns of an accumulator tile; a lane owns column lane % SIDE and belongs to group lane / SIDE
//   ACC      registers of an accumulator tile
//   CHUNK    steps of a contraction that one Operand covers
//   REGS     accumulator registers that one Operand is made of (to_operand)
//   VEC      neighbouring features that a lane reads at once for add_columns: the features of VEC accumulator tiles
//   RUN      registers of a lane that are neighbouring accumulator rows
//   const_row(n) + lane_row()  is the streamed row of register n, counted over all tiles of a block
#pragma once

template <class T>
constexpr PF_DEVICE T least(T a, T b) {
    return a < b ? a : b;
}
template <class T>
constexpr PF_DEVICE T most(T a, T b) {
    return a > b ? a : b;
}

PF_DEVICE int lane_index() { return thread_index() % WAVE; }
PF_DEVICE int lane_column() { return lane_index() % SIDE; }
PF_DEVICE int lane_group() { return lane_index() / SIDE; }

// ------------------------------------------------------------------ elements
PF_DEVICE uint16 bfloat_bits(float x) {  // to nearest even; a NaN stays one
    const uint32 bits = as_uint(x);
    const uint32 rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    return static_cast<uint16>((x != x ? bits | 0x400000u : rounded) >> 16);
}

template <class T>
PF_DEVICE float widen(uint16 bits) {
    if constexpr (same<T, Float16>) return float_of_half(bits);
    else return as_float(static_cast<uint32>(bits) << 16);
}

// Two floats as 16-bit elements, the first in the low half.
template <class T>
PF_DEVICE uint32 pack2(float low, float high) {
#if defined(__gfx950__)
    if constexpr (same<T, BFloat16>) {
        using bfloat2_t = __bf16 __attribute__((ext_vector_type(2)));
        const bfloat2_t both = {static_cast<__bf16>(low), static_cast<__bf16>(high)};
        return __builtin_bit_cast(uint32, both);
    }
#endif
    if constexpr (same<T, Float16>) return half_bits(low) | static_cast<uint32>(half_bits(high)) << 16;
    else return bfloat_bits(low) | static_cast<uint32>(bfloat_bits(high)) << 16;
}

// The same for probabilities and score gradients, in fewer instructions: to nearest, halves away from zero, special NaNs left aside.
template <class T>
PF_DEVICE uint32 pack2_fast(float low, float high) {
#if !defined(__gfx950__)
    if constexpr (same<T, BFloat16>) {
        const uint32 a = as_uint(low), b = as_uint(high);
        return byte_permute(b + 0x8000u, a + 0x8000u, 0x07060302u);
    }
#endif
    return pack2<T>(low, high);
}

// ------------------------------------------------------------------ tiles in LDS
// ROWS of WIDTH elements, in pieces of 16 bytes. Rows are multiples of 64 bytes, so that unmoved pieces of one column would
// share banks: piece q of row r lies at q ^ twist(r), which spreads eight rows over all 32 banks without padding. (What is left:
// rows of an odd multiple of 64 bytes, head dims like 96, are read by columns two lanes a bank.)
template <int WIDTH>
struct Tile {
    static constexpr int STRIDE = WIDTH * Element::bytes;  // bytes
    static constexpr int PIECES = STRIDE / 16;             // of a row
    static constexpr bool WHOLE = PIECES % 8 == 0;         // rows are multiples of all banks, else of half of them
    static constexpr uint32 MASK = WHOLE ? 7 : 3;
    static_assert(PIECES % 4 == 0, "rows are multiples of 64 bytes");

    unsigned char* base;

    static PF_DEVICE uint32 twist(uint32 row) { return WHOLE ? row & 7u : row >> 1 & 3u; }
    static PF_DEVICE uint32 offset(uint32 row, uint32 piece) { return row * STRIDE + ((piece ^ twist(row)) << 4); }

    // Byte offset of (lane's row + row, lane's piece + piece), given offset(lane's row, lane's piece): the lane's and the constant
    // parts of row and piece must not share bits (no carries), so that constants become immediate offsets of the access.
    static PF_DEVICE uint32 shift(uint32 lane_offset, uint32 row, uint32 piece) {
        return (lane_offset ^ ((twist(row) ^ (piece & MASK)) << 4)) + row * STRIDE + (piece & ~MASK) * 16;
    }

    template <int DWORDS>
    PF_DEVICE Vector<uint32, DWORDS> read(uint32 bytes) const {
        return *reinterpret_cast<const Vector<uint32, DWORDS>*>(base + bytes);
    }
    PF_DEVICE void write(uint32 row, uint32 piece, Vector<uint32, 4> data) const {
        *reinterpret_cast<Vector<uint32, 4>*>(base + offset(row, piece)) = data;
    }
};

#if PF_MATRIX == PF_MATRIX_FMA
#include "matrix_fma.h"
#else
#include "matrix_units.h"
#endif

// All streamed rows of register n that some column of the wave has set, as bits of n: an "or" over the lanes of a group.
PF_DEVICE uint32 any_column(uint32 bits) {
    bits |= lane_xor<1>(bits);
    bits |= lane_xor<2>(bits);
    bits |= lane_xor<4>(bits);
    bits |= lane_xor<8>(bits);
    if constexpr (SIDE == 32) bits |= lane_xor<16>(bits);
    return bits;
}

// Reductions over the groups that share a column.
template <class F>
PF_DEVICE float over_groups(float x, F combine) {
    if constexpr (SIDE <= 16 && WAVE > 16) x = combine(x, as_float(lane_xor<16>(as_uint(x))));
    if constexpr (WAVE == 64) x = combine(x, as_float(lane_xor<32>(as_uint(x))));
    return x;
}
