// The host as a machine for the kernels: every name that platform.h lists, for g++ and clang++ on a CPU.
//
// Work-items are fibers of one thread (harness.cpp). What the lanes of a wave do together is a meeting: each lane leaves
// its operands and waits, and when all of the wave have come to the same one its result is computed for all of them.
// Macros for negative controls: SIMT_NO_BARRIER, SIMT_SWAPPED_ROWS and SIMT_MISSING_LDS (bytes) break what they name.
#pragma once

namespace simt {
using Operation = void (*)(void* const* lanes);  // lanes[i]: what lane i brought
void meet(const char* what, int line, Operation operation, void* mine);
void barrier(int line);
[[noreturn]] void fail(const char* format, ...);
unsigned char* shared_memory(int bytes, int missing);
int thread_index();
int program_index();

enum class Unit { MFMA, WMMA_GFX11, WMMA_GFX12 };
struct Product {
    const uint32 *a, *b;
    float* c;
};
// c += a b for the whole wave; element_bits 16 is binary16, 17 bfloat16, 32 binary32.
void multiply(Unit unit, int element_bits, int side, int depth, Product* const* lanes);
uint32 byte_permute(uint32 a, uint32 b, uint32 selectors);
float exp2_of(float x);
float log2_of(float x);
uint16 half_bits(float x);
float float_of_half(uint16 bits);
}  // namespace simt

#ifndef SIMT_MISSING_LDS
#define SIMT_MISSING_LDS 0
#endif
#define PF_DEVICE inline
#define PF_KERNEL(threads)                     \
    extern const int simt_threads = (threads); \
    extern "C"
#define PF_SHARED(bytes) unsigned char* const shared_memory = simt::shared_memory((bytes), SIMT_MISSING_LDS)

inline int thread_index() { return simt::thread_index(); }
inline int program_index() { return simt::program_index(); }
#ifdef SIMT_NO_BARRIER
inline void barrier() {}
#else
inline void barrier(int line = __builtin_LINE()) { simt::barrier(line); }
#endif

inline void schedule_fence() {}
inline void settle(float&) {}

inline float as_float(uint32 x) { return __builtin_bit_cast(float, x); }
inline uint32 as_uint(float x) { return __builtin_bit_cast(uint32, x); }

template <int MASK>
inline uint32 lane_xor(uint32 x, int line = __builtin_LINE()) {
    struct Lane {
        uint32 x, result;
    } mine = {x, 0};
    simt::meet(__PRETTY_FUNCTION__, line, [](void* const* lanes) {
        for (int i = 0; i < PF_WAVE; ++i) static_cast<Lane*>(lanes[i])->result = static_cast<Lane*>(lanes[(i ^ MASK) % PF_WAVE])->x;
    }, &mine);
    return mine.result;
}

inline bool any_lane(bool x, int line = __builtin_LINE()) {
    bool mine = x;
    simt::meet(__PRETTY_FUNCTION__, line, [](void* const* lanes) {
        bool any = false;
        for (int i = 0; i < PF_WAVE; ++i) any = any || *static_cast<bool*>(lanes[i]);
        for (int i = 0; i < PF_WAVE; ++i) *static_cast<bool*>(lanes[i]) = any;
    }, &mine);
    return mine;
}

inline int uniform(int x, int line = __builtin_LINE()) {
    simt::meet(__PRETTY_FUNCTION__, line, [](void* const* lanes) {
        for (int i = 1; i < PF_WAVE; ++i) {
            if (*static_cast<int*>(lanes[i]) != *static_cast<int*>(lanes[0])) simt::fail("lanes 0 and %d differ in what is uniform", i);
        }
    }, &x);
    return x;
}

inline float exp2_of(float x) { return simt::exp2_of(x); }
inline float log2_of(float x) { return simt::log2_of(x); }
inline float max_of(float a, float b) { return __builtin_fmaxf(a, b); }
inline float min_of(float a, float b) { return __builtin_fminf(a, b); }
inline float fma_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline uint16 half_bits(float x) { return simt::half_bits(x); }
inline float float_of_half(uint16 bits) { return simt::float_of_half(bits); }

inline uint32 byte_permute(uint32 a, uint32 b, uint32 selectors) { return simt::byte_permute(a, b, selectors); }

inline float dot2(uint32 a, uint32 b, float c) {
    c = fma_of(float_of_half(static_cast<uint16>(a)), float_of_half(static_cast<uint16>(b)), c);
    return fma_of(float_of_half(static_cast<uint16>(a >> 16)), float_of_half(static_cast<uint16>(b >> 16)), c);
}

namespace simt {
template <Unit UNIT, class T, int SIDE, int DEPTH, int E, int ACC>
inline Vector<float, ACC> product(const Vector<uint32, E>& a, const Vector<uint32, E>& b, Vector<float, ACC> c, int line) {
    static_assert(E * 4 == T::bytes * (UNIT == Unit::WMMA_GFX11 ? DEPTH : SIDE * DEPTH / PF_WAVE) && ACC == SIDE * SIDE / PF_WAVE);
    Product mine = {a.data, b.data, c.data};
    meet(__PRETTY_FUNCTION__, line, [](void* const* lanes) {
        constexpr int bits = __is_same(T, Float16) ? 16 : __is_same(T, BFloat16) ? 17 : 32;
        multiply(UNIT, bits, SIDE, DEPTH, reinterpret_cast<Product* const*>(lanes));
    }, &mine);
#ifdef SIMT_SWAPPED_ROWS
    const float first = c.data[0];
    c.data[0] = c.data[1];
    c.data[1] = first;
#endif
    return c;
}
}  // namespace simt

#if PF_MATRIX == PF_MATRIX_MFMA
template <class T, int SIDE, int DEPTH, int E, int ACC>
inline Vector<float, ACC> mfma(Vector<uint32, E> a, Vector<uint32, E> b, Vector<float, ACC> c, int line = __builtin_LINE()) {
    return simt::product<simt::Unit::MFMA, T, SIDE, DEPTH>(a, b, c, line);
}
#elif PF_MATRIX == PF_MATRIX_WMMA11
template <class T>
inline Vector<float, 8> wmma_gfx11(Vector<uint32, 8> a, Vector<uint32, 8> b, Vector<float, 8> c, int line = __builtin_LINE()) {
    return simt::product<simt::Unit::WMMA_GFX11, T, 16, 16>(a, b, c, line);
}
#elif PF_MATRIX == PF_MATRIX_WMMA12
template <class T>
inline Vector<float, 8> wmma_gfx12(Vector<uint32, 4> a, Vector<uint32, 4> b, Vector<float, 8> c, int line = __builtin_LINE()) {
    return simt::product<simt::Unit::WMMA_GFX12, T, 16, 16>(a, b, c, line);
}
#endif
