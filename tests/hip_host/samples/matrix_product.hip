// dquery = query key^T + value through one matrix instruction: query and key (SIDE, DEPTH), value (SIDE, SIDE) float32.
#define PF_MATRIX_MFMA 1
#define PF_MATRIX_WMMA11 2
#define PF_MATRIX_WMMA12 3
#include "platform.h"
#include "call.h"

constexpr int SIDE = PF_SIDE, DEPTH = PF_DEPTH, WAVE = PF_WAVE, ACC = SIDE * SIDE / WAVE;
constexpr bool WHOLE = PF_MATRIX == PF_MATRIX_WMMA11;
constexpr int ELEMENTS = WHOLE ? DEPTH : SIDE * DEPTH / WAVE, DWORDS = ELEMENTS * PF_DTYPE::bytes / 4;

PF_KERNEL(WAVE) void matrix_product(PF_ARGUMENTS) {
    const int lane = thread_index(), line = lane % SIDE, group = lane / SIDE;
    Vector<uint32, DWORDS> a, b;
    const int first = (line * DEPTH + (WHOLE ? 0 : group * ELEMENTS)) * PF_DTYPE::bytes / 4;
    for (int i = 0; i < DWORDS; ++i) {
        a.data[i] = static_cast<const uint32*>(query)[first + i];
        b.data[i] = static_cast<const uint32*>(key)[first + i];
    }
    const auto row = [group](int r) {
        return PF_MATRIX == PF_MATRIX_MFMA ? r / 4 * (256 / SIDE) + group * 4 + r % 4 : WHOLE ? 2 * r + group : group * 8 + r;
    };
    Vector<float, ACC> c;
    for (int r = 0; r < ACC; ++r) c.data[r] = static_cast<const float*>(value)[row(r) * SIDE + line];
#if PF_MATRIX == PF_MATRIX_MFMA
    c = mfma<PF_DTYPE, SIDE, DEPTH>(a, b, c);
#elif PF_MATRIX == PF_MATRIX_WMMA11
    c = wmma_gfx11<PF_DTYPE>(a, b, c);
#else
    c = wmma_gfx12<PF_DTYPE>(a, b, c);
#endif
    for (int r = 0; r < ACC; ++r) static_cast<float*>(dquery)[row(r) * SIDE + line] = c.data[r];
}
