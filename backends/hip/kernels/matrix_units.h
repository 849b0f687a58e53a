// The matrix layer over matrix units: MFMA (CDNA) and WMMA (RDNA 3 and 4). See matrix.h for the interface.
#pragma once

constexpr bool IS_MFMA = PF_MATRIX == PF_MATRIX_MFMA;
constexpr bool IS_WMMA11 = PF_MATRIX == PF_MATRIX_WMMA11;
static_assert(IS_MFMA ? WAVE == 64 : (WAVE == 32 && !IS_FLOAT32 && SIDE == 16), "no such matrix instruction");

constexpr int GROUPS = WAVE / SIDE;
constexpr int ACC = SIDE * SIDE / WAVE;
constexpr int DWORDS = IS_WMMA11 ? 8 : 4;                             // of an operand
constexpr int ELEMENTS = DWORDS * 4 / Element::bytes;                 // that a lane gives to it
constexpr int CHUNK = IS_WMMA11 ? 16 : ELEMENTS * GROUPS;
constexpr int REGS = CHUNK * SIDE / WAVE;
constexpr int RUN = IS_MFMA ? 4 : IS_WMMA11 ? 1 : 8;
using Operand = Vector<uint32, DWORDS>;
using Accumulator = Vector<float, ACC>;

template <int WIDTH>
constexpr int VEC = WIDTH % (SIDE * 4) == 0 ? 4 : WIDTH % (SIDE * 2) == 0 ? 2 : 1;

constexpr PF_DEVICE int const_row(int n) {
    if (IS_MFMA) return n / 4 * (256 / SIDE) + n % 4;
    return n / 8 * 16 + (IS_WMMA11 ? 2 : 1) * (n % 8);
}
PF_DEVICE int lane_row() { return lane_group() * (IS_MFMA ? 4 : IS_WMMA11 ? 1 : 8); }

PF_DEVICE Accumulator multiply(Operand a, Operand b, Accumulator c) {
#if PF_MATRIX == PF_MATRIX_WMMA11
    return wmma_gfx11<Element>(a, b, c);
#elif PF_MATRIX == PF_MATRIX_WMMA12
    return wmma_gfx12<Element>(a, b, c);
#else
    // As many instructions as it takes to use up the operands; which of its steps an instruction covers does not matter, as
    // both operands agree on it.
    constexpr int PART = MFMA_DWORDS;
    constexpr int DEPTH = CHUNK * PART / DWORDS;
#pragma unroll
    for (int i = 0; i < DWORDS / PART; ++i) {
        Vector<uint32, PART> a_part, b_part;
#pragma unroll
        for (int j = 0; j < PART; ++j) {
            a_part.data[j] = a.data[i * PART + j];
            b_part.data[j] = b.data[i * PART + j];
        }
        c = mfma<Element, SIDE, DEPTH>(a_part, b_part, c);
    }
    return c;
#endif
}

// ------------------------------------------------------------------ operands from LDS
// The contraction runs along a row: the lane's own row of the tile, steps chunk * CHUNK and on.
template <int WIDTH>
PF_DEVICE Operand row_operand(const Tile<WIDTH>& tile, uint32 row, int chunk) {
    if constexpr (IS_WMMA11) {
        const uint32 lane = Tile<WIDTH>::offset(lane_column(), 0);
        constexpr int PER_CHUNK = 2;
        const auto low = tile.template read<4>(Tile<WIDTH>::shift(lane, row, chunk * PER_CHUNK));
        const auto high = tile.template read<4>(Tile<WIDTH>::shift(lane, row, chunk * PER_CHUNK + 1));
        Operand operand;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            operand.data[i] = low.data[i];
            operand.data[4 + i] = high.data[i];
        }
        return operand;
    } else {
        return tile.template read<4>(Tile<WIDTH>::shift(Tile<WIDTH>::offset(lane_column(), lane_group()), row, chunk * GROUPS));
    }
}

template <int NT, int TILES, int WIDTH>
PF_DEVICE void add_rows(Accumulator (&acc)[NT][TILES], const Tile<WIDTH>& tile, int chunk, const Operand (&b)[NT]) {
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
        const Operand a = row_operand(tile, m * SIDE, chunk);
#pragma unroll
        for (int n = 0; n < NT; ++n) acc[n][m] = multiply(a, b[n], acc[n][m]);
    }
}

// The contraction runs over streamed rows, those of the registers chunk * REGS and on. A lane reads VEC features of each row and
// turns them round, 16-bit elements by byte permutations, into the operands of VEC accumulator tiles: tile t of group `group`
// has features group * SIDE * VEC + row * VEC + t. Rows whose bit in `seen` is not set count as 0, whatever they hold.
template <int VEC_, int WIDTH>
PF_DEVICE void column_operands(Operand (&operands)[VEC_], const Tile<WIDTH>& tile, int chunk, int group, bool hide, uint32 seen) {
    constexpr int BYTES = VEC_ * Element::bytes;
    constexpr int ROW_DWORDS = BYTES / 4;
    const uint32 feature_bytes = lane_column() * BYTES;
    const uint32 row = IS_WMMA11 ? 0 : lane_row();
    const uint32 lane = Tile<WIDTH>::offset(row, feature_bytes / 16) + feature_bytes % 16;
    Vector<uint32, ROW_DWORDS> rows[ELEMENTS];
#pragma unroll
    for (int i = 0; i < ELEMENTS; ++i) {
        const int streamed = IS_WMMA11 ? chunk * 16 + i : const_row(chunk * REGS + i);
        rows[i] = tile.template read<ROW_DWORDS>(Tile<WIDTH>::shift(lane, streamed, group * SIDE * BYTES / 16));
        if (hide) {
#pragma unroll
            for (int j = 0; j < ROW_DWORDS; ++j) rows[i].data[j] = seen >> i & 1u ? rows[i].data[j] : 0u;
        }
    }
#pragma unroll
    for (int t = 0; t < VEC_; ++t) {
#pragma unroll
        for (int j = 0; j < DWORDS; ++j) {
            if constexpr (IS_FLOAT32) operands[t].data[j] = rows[j].data[t];
            else operands[t].data[j] = byte_permute(rows[2 * j + 1].data[t / 2], rows[2 * j].data[t / 2], t % 2 ? 0x07060302u : 0x05040100u);
        }
    }
}

template <int NT, int TILES, int WIDTH>
PF_DEVICE void add_columns(
    Accumulator (&acc)[NT][TILES], const Tile<WIDTH>& tile, int chunk, const Operand (&b)[NT], bool hide, uint32 seen) {
    constexpr int V = VEC<WIDTH>;
#pragma unroll
    for (int group = 0; group < TILES / V; ++group) {
        Operand a[V];
        column_operands(a, tile, chunk, group, hide, seen);
#pragma unroll
        for (int t = 0; t < V; ++t) {
#pragma unroll
            for (int n = 0; n < NT; ++n) acc[n][group * V + t] = multiply(a[t], b[n], acc[n][group * V + t]);
        }
        if constexpr (SCARCE) schedule_fence();
    }
}

// ------------------------------------------------------------------ from accumulators to operands
PF_DEVICE Operand to_operand(const float* regs) {
    Operand operand;
    if constexpr (IS_FLOAT32) {
#pragma unroll
        for (int i = 0; i < DWORDS; ++i) operand.data[i] = as_uint(regs[i]);
    } else if constexpr (!IS_WMMA11) {
#pragma unroll
        for (int i = 0; i < DWORDS; ++i) operand.data[i] = pack2_fast<Element>(regs[2 * i], regs[2 * i + 1]);
    } else {
        // This half wave has every second row, the other half the others; both need all of them, in order.
        const uint32 odd = lane_group();
        const uint32 low = odd ? 0x01000504u : 0x05040100u, high = odd ? 0x03020706u : 0x07060302u;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const uint32 own = pack2_fast<Element>(regs[2 * i], regs[2 * i + 1]);
            const uint32 other = lane_xor<16>(own);
            operand.data[2 * i] = byte_permute(other, own, low);
            operand.data[2 * i + 1] = byte_permute(other, own, high);
        }
    }
    return operand;
}

// Bits by register of the chunk, as bits by element of the operand's rows.
PF_DEVICE uint32 rows_of_chunk(uint32 bits, int chunk) {
    const uint32 own = bits >> (chunk * REGS) & ((1u << REGS) - 1u);
    if constexpr (!IS_WMMA11) return own;
    const uint32 other = lane_xor<16>(own);
    uint32 even = lane_group() ? other : own, odd = lane_group() ? own : other, both = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) both |= (even >> i & 1u) << (2 * i) | (odd >> i & 1u) << (2 * i + 1);
    return both;
}
