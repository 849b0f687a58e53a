// The matrix layer over plain arithmetic: fused multiply-adds, and packed dot products where the GPU has them.
// See matrix.h for the interface. A lane computes ACC rows of its column; what it needs of the streamed block it reads from LDS,
// where the lanes of a group read the same address.
#pragma once

constexpr int GROUPS = WAVE / 16;
constexpr int ACC = 16 * 16 / WAVE;
constexpr int CHUNK = 16;
constexpr int REGS = ACC;
constexpr int RUN = ACC;
constexpr int DWORDS = CHUNK * Element::bytes / 4;  // of an operand: the whole chunk of the lane's column
using Operand = Vector<uint32, DWORDS>;
using Accumulator = Vector<float, ACC>;
static_assert(SIDE == 16, "this layer has tiles of 16 by 16");

template <int WIDTH>
constexpr int VEC = 1;

constexpr PF_DEVICE int const_row(int n) { return n / ACC * 16 + n % ACC; }
PF_DEVICE int lane_row() { return lane_group() * ACC; }

template <int WIDTH>
PF_DEVICE Operand row_at(const Tile<WIDTH>& tile, uint32 lane_offset, uint32 row, int chunk) {
    Operand operand;
#pragma unroll
    for (int p = 0; p < DWORDS / 4; ++p) {
        const auto piece = tile.template read<4>(Tile<WIDTH>::shift(lane_offset, row, chunk * (DWORDS / 4) + p));
#pragma unroll
        for (int i = 0; i < 4; ++i) operand.data[4 * p + i] = piece.data[i];
    }
    return operand;
}

template <int WIDTH>
PF_DEVICE Operand row_operand(const Tile<WIDTH>& tile, uint32 row, int chunk) {
    return row_at(tile, Tile<WIDTH>::offset(lane_column(), 0), row, chunk);
}

PF_DEVICE float element(const Operand& operand, int i) {
    if constexpr (IS_FLOAT32) return as_float(operand.data[i]);
    else return widen<Element>(static_cast<uint16>(operand.data[i / 2] >> (i % 2 * 16)));
}

template <int NT, int TILES, int WIDTH>
PF_DEVICE void add_rows(Accumulator (&acc)[NT][TILES], const Tile<WIDTH>& tile, int chunk, const Operand (&b)[NT]) {
#pragma unroll
    for (int m = 0; m < TILES; ++m) {
#pragma unroll
        for (int r = 0; r < ACC; ++r) {
            const Operand a = row_at(tile, Tile<WIDTH>::offset(lane_row(), 0), m * 16 + r, chunk);
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                float sum = acc[n][m].data[r];
                if constexpr (same<Element, Float16>) {
#pragma unroll
                    for (int i = 0; i < DWORDS; ++i) sum = dot2(a.data[i], b[n].data[i], sum);
                } else {
#pragma unroll
                    for (int i = 0; i < CHUNK; ++i) sum = fma_of(element(a, i), element(b[n], i), sum);
                }
                acc[n][m].data[r] = sum;
            }
            if (SCARCE && r % 2 == 1) {
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    settle(acc[n][m].data[r - 1]);
                    settle(acc[n][m].data[r]);
                }
                schedule_fence();
            }
        }
    }
}

// Tile t has features t * 16 and on; a lane's are neighbours.
template <int NT, int TILES, int WIDTH>
PF_DEVICE void add_columns(
    Accumulator (&acc)[NT][TILES], const Tile<WIDTH>& tile, int chunk, const Operand (&b)[NT], bool hide, uint32 seen) {
    constexpr int BYTES = ACC * Element::bytes;         // of a lane's features of one row
    constexpr int PART = BYTES < 16 ? BYTES / 4 : 4;    // dwords of one access
    const uint32 first = lane_row() * Element::bytes;
#pragma unroll
    for (int t = 0; t < TILES; ++t) {
#pragma unroll
        for (int k = 0; k < CHUNK; ++k) {
            float a[ACC];
#pragma unroll
            for (int p = 0; p < BYTES / (4 * PART); ++p) {
                const uint32 lane = Tile<WIDTH>::offset(0, first / 16) + first % 16;
                const auto part =
                    tile.template read<PART>(Tile<WIDTH>::shift(lane, chunk * CHUNK + k, t * (Element::bytes) + p));
#pragma unroll
                for (int i = 0; i < PART * 4 / Element::bytes; ++i) {
                    const int j = p * PART * 4 / Element::bytes + i;
                    if constexpr (IS_FLOAT32) a[j] = as_float(part.data[i]);
                    else a[j] = widen<Element>(static_cast<uint16>(part.data[i / 2] >> (i % 2 * 16)));
                    if (hide && !(seen >> k & 1u)) a[j] = 0.0f;
                }
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const float p = element(b[n], k);
#pragma unroll
                for (int r = 0; r < ACC; ++r) acc[n][t].data[r] = fma_of(a[r], p, acc[n][t].data[r]);
            }
            if (SCARCE && k % (IS_FLOAT32 ? 4 : 8) == 3) {
#pragma unroll
                for (int n = 0; n < NT; ++n) {
#pragma unroll
                    for (int r = 0; r < ACC; ++r) settle(acc[n][t].data[r]);
                }
                schedule_fence();
            }
        }
    }
}

// Every lane of a column needs the rows of all groups.
template <int N>
PF_DEVICE void gather_groups(uint32 (&all)[GROUPS][N], const uint32 (&own)[N]) {
    const int group = lane_group();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        uint32 from[GROUPS];  // by exclusive or of the groups' indices
        from[0] = own[i];
        from[1] = lane_xor<16>(own[i]);
        if constexpr (GROUPS == 4) {
            from[2] = lane_xor<32>(own[i]);
            from[3] = lane_xor<32>(from[1]);
        }
#pragma unroll
        for (int g = 0; g < GROUPS; ++g) {
            uint32 value = from[0];
#pragma unroll
            for (int x = 1; x < GROUPS; ++x) value = (group ^ g) == x ? from[x] : value;
            all[g][i] = value;
        }
    }
}

PF_DEVICE Operand to_operand(const float* regs) {
    constexpr int N = DWORDS / GROUPS;
    uint32 own[N], all[GROUPS][N];
#pragma unroll
    for (int i = 0; i < N; ++i) own[i] = IS_FLOAT32 ? as_uint(regs[i]) : pack2_fast<Element>(regs[2 * i % ACC], regs[(2 * i + 1) % ACC]);
    gather_groups(all, own);
    Operand operand;
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) {
#pragma unroll
        for (int i = 0; i < N; ++i) operand.data[g * N + i] = all[g][i];
    }
    return operand;
}

PF_DEVICE uint32 rows_of_chunk(uint32 bits, int chunk) {
    const uint32 own[1] = {bits >> (chunk * REGS) & ((1u << REGS) - 1u)};
    uint32 all[GROUPS][1], rows = 0;
    gather_groups(all, own);
#pragma unroll
    for (int g = 0; g < GROUPS; ++g) rows |= all[g][0] << (g * ACC);
    return rows;
}
