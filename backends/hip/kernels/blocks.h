// Blocks of rows: the one that streams from global memory through registers into LDS, and the one that stays.
#pragma once

// 16 bytes of a row from element `column` on; elements past the head dimension and rows outside count as 0 and are not read.
template <int WIDTH_IN_MEMORY>
PF_DEVICE Vector<uint32, 4> read_piece(const unsigned char* row, int column, bool inside) {
    constexpr int COUNT = 16 / Element::bytes;
    Vector<uint32, 4> piece = {{0, 0, 0, 0}};
    if constexpr (WIDE_LOADS) {
        if (inside && (WIDTH_IN_MEMORY % 32 == 0 || column < WIDTH_IN_MEMORY)) piece = *reinterpret_cast<const Vector<uint32, 4>*>(row + column * Element::bytes);
    } else {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (!inside || column + i >= WIDTH_IN_MEMORY) continue;
            const unsigned char* element = row + (column + i) * Element::bytes;
            if constexpr (IS_FLOAT32) piece.data[i] = *reinterpret_cast<const uint32*>(element);
            else piece.data[i / 2] |= static_cast<uint32>(*reinterpret_cast<const uint16*>(element)) << (i % 2 * 16);
        }
    }
    return piece;
}

// One head of a tensor (rows, IN_MEMORY) whose rows outside [lo, hi) may not be read.
struct Rows {
    const unsigned char* base;  // row 0
    int64 stride;               // bytes from row to row
    int lo, hi;

    PF_DEVICE const unsigned char* at(int row) const { return base + row * stride; }
    PF_DEVICE bool inside(int row) const { return row >= lo && row < hi; }
};

// ROWS rows that all work-items of the workgroup bring in together. `fetch` starts the loads, `put` writes to LDS what arrived:
// between the two the previous block is computed with.
template <int ROWS, int WIDTH, int IN_MEMORY>
struct Stream {
    static constexpr int PIECES = Tile<WIDTH>::PIECES;
    static constexpr int TOTAL = ROWS * PIECES;
    static constexpr int SHARE = (TOTAL + THREADS - 1) / THREADS;  // of a work-item
    static constexpr int BYTES = TOTAL * 16;

    Vector<uint32, 4> pieces[SHARE];

    PF_DEVICE void fetch(const Rows& rows, int first) {
        if (first >= rows.lo && first + ROWS <= rows.hi) load<true>(rows, first);  // the same for all: whole blocks ask no questions
        else load<false>(rows, first);
    }

    template <bool WHOLE>
    PF_DEVICE void load(const Rows& rows, int first) {
        const unsigned char* block = rows.at(first);
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const int p = thread_index() + i * THREADS;
            const int row = p / PIECES, column = p % PIECES * (16 / Element::bytes);
            if (TOTAL % THREADS == 0 || p < TOTAL)
                pieces[i] = read_piece<IN_MEMORY>(block + row * rows.stride, column, WHOLE || rows.inside(first + row));
        }
    }

    PF_DEVICE void put(const Tile<WIDTH>& tile) const {
#pragma unroll
        for (int i = 0; i < SHARE; ++i) {
            const int p = thread_index() + i * THREADS;
            if (TOTAL % THREADS == 0 || p < TOTAL) tile.write(p / PIECES, p % PIECES, pieces[i]);
        }
    }
};

// The same without registers in between but for a few pieces at a time: no load runs ahead of the arithmetic.
template <int ROWS, int WIDTH, int IN_MEMORY>
PF_DEVICE void copy_rows(const Tile<WIDTH>& tile, const Rows& rows, int first) {
    constexpr int PIECES = Tile<WIDTH>::PIECES, TOTAL = ROWS * PIECES, AT_ONCE = TOTAL >= 4 * THREADS ? 4 : 1;
#pragma unroll 1
    for (int p = thread_index(); p < TOTAL; p += AT_ONCE * THREADS) {
        Vector<uint32, 4> pieces[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int row = (p + i * THREADS) / PIECES, piece = (p + i * THREADS) % PIECES;
            const bool inside = (TOTAL % (AT_ONCE * THREADS) == 0 || p + i * THREADS < TOTAL) && rows.inside(first + row);
            pieces[i] = read_piece<IN_MEMORY>(rows.at(first + row), piece * (16 / Element::bytes), inside);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; ++i) {
            const int q = p + i * THREADS;
            if (TOTAL % (AT_ONCE * THREADS) == 0 || q < TOTAL) tile.write(q / PIECES, q % PIECES, pieces[i]);
        }
    }
}

// The block that stays, as second operands of products: ROWS rows for the workgroup, of which each wave owns NT * SIDE.
template <int ROWS, int WIDTH, int IN_MEMORY, bool IN_LDS>
struct Stationary;

template <int ROWS, int WIDTH, int IN_MEMORY>
struct Stationary<ROWS, WIDTH, IN_MEMORY, false> {
    static constexpr int NT = ROWS / (WAVES * SIDE);
    static constexpr int BYTES = 0;  // of LDS

    Operand operands[NT][WIDTH / CHUNK];

    PF_DEVICE void load(unsigned char*, const Rows& rows, int first, int wave) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const int row = first + (wave * NT + n) * SIDE + lane_column();
            const bool inside = rows.inside(row);
#pragma unroll
            for (int c = 0; c < WIDTH / CHUNK; ++c) {
#pragma unroll
                for (int p = 0; p < DWORDS / 4; ++p) {
                    // operands of 4 dwords are shared out among the groups, longer ones held whole by each
                    const int piece = CHUNK * Element::bytes / 16 == DWORDS / 4 ? c * (DWORDS / 4) + p : c * GROUPS + lane_group();
                    const auto data = read_piece<IN_MEMORY>(rows.at(row), piece * (16 / Element::bytes), inside);
#pragma unroll
                    for (int i = 0; i < 4; ++i) operands[n][c].data[4 * p + i] = data.data[i];
                }
            }
        }
    }

    PF_DEVICE Operand operand(int n, int chunk, int) const { return operands[n][chunk]; }
};

template <int ROWS, int WIDTH, int IN_MEMORY>
struct Stationary<ROWS, WIDTH, IN_MEMORY, true> {
    static constexpr int NT = ROWS / (WAVES * SIDE);
    static constexpr int BYTES = ROWS * Tile<WIDTH>::STRIDE;

    Tile<WIDTH> tile;

    // The caller's next barrier makes the rows visible.
    PF_DEVICE void load(unsigned char* lds, const Rows& rows, int first, int) {
        tile.base = lds;
        copy_rows<ROWS, WIDTH, IN_MEMORY>(tile, rows, first);
    }

    PF_DEVICE Operand operand(int n, int chunk, int wave) const { return row_operand(tile, (wave * NT + n) * SIDE, chunk); }
};

// Products of all rows of a streamed tile with the rows that stay.
template <int NT, int TILES, int WIDTH, class Block>
PF_DEVICE void products(Accumulator (&acc)[NT][TILES], const Tile<WIDTH>& tile, const Block& block, int wave) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int m = 0; m < TILES; ++m) acc[n][m] = Accumulator{};
    }
#pragma unroll
    for (int c = 0; c < WIDTH / CHUNK; ++c) {
        Operand b[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) b[n] = block.operand(n, c, wave);
        add_rows(acc, tile, c, b);
        if constexpr (SCARCE) schedule_fence();
    }
}

// acc += (rows of the tile)^T times the score matrix that `scores` holds register by register.
template <int NT, int TILES, int R, int WIDTH>
PF_DEVICE void accumulate(Accumulator (&acc)[NT][TILES], const Tile<WIDTH>& tile, const float (&scores)[NT][R], bool hide, uint32 seen) {
#pragma unroll
    for (int c = 0; c < R / REGS; ++c) {
        Operand b[NT];
#pragma unroll
        for (int n = 0; n < NT; ++n) b[n] = to_operand(&scores[n][c * REGS]);
        add_columns(acc, tile, c, b, hide, hide ? rows_of_chunk(seen, c) : 0);
    }
}

// Write the transposed accumulator of one of the lane's columns to its row, times `factor`.
template <int IN_MEMORY, int TILES>
PF_DEVICE void store_row(unsigned char* row, const Accumulator (&acc)[TILES], float factor) {
    constexpr int V = VEC<TILES * SIDE>;
    constexpr int COUNT = RUN * V;  // neighbouring features
    constexpr int STEP = COUNT * Element::bytes >= 16 ? 16 / Element::bytes : COUNT;
#pragma unroll
    for (int group = 0; group < TILES / V; ++group) {
#pragma unroll
        for (int r = 0; r < ACC; r += RUN) {
            const int first = group * SIDE * V + (const_row(r) + lane_row()) * V;
#pragma unroll
            for (int s = 0; s < COUNT; s += STEP) {
                float values[STEP];
#pragma unroll
                for (int i = 0; i < STEP; ++i) values[i] = acc[group * V + (s + i) % V].data[r + (s + i) / V] * factor;
                const int feature = first + s;
                if constexpr (WIDE_LOADS) {
                    if (feature >= IN_MEMORY) continue;
                    Vector<uint32, STEP * Element::bytes / 4> packed;
#pragma unroll
                    for (int i = 0; i < STEP * Element::bytes / 4; ++i)
                        packed.data[i] = IS_FLOAT32 ? as_uint(values[i]) : pack2<Element>(values[2 * i % STEP], values[(2 * i + 1) % STEP]);
                    *reinterpret_cast<Vector<uint32, STEP * Element::bytes / 4>*>(row + feature * Element::bytes) = packed;
                } else {
#pragma unroll
                    for (int i = 0; i < STEP; ++i) {
                        if (feature + i >= IN_MEMORY) continue;
                        if constexpr (IS_FLOAT32) reinterpret_cast<float*>(row)[feature + i] = values[i];
                        else reinterpret_cast<uint16*>(row)[feature + i] = static_cast<uint16>(pack2<Element>(values[i], 0.0f));
                    }
                }
            }
        }
    }
}
