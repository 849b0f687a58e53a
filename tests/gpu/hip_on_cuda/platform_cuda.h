// NVIDIA GPUs, so that the HIP kernels' source runs on real hardware: see kernels/platform.h for what each name means.
// RDNA's matrix instructions are put together from shuffles by their documented lane layouts; CDNA's need waves of 64.
#pragma once

#define PF_DEVICE __device__ __forceinline__
#define PF_KERNEL(threads) extern "C" __global__ __launch_bounds__(threads)
// The launcher sizes shared memory by Kernel.lds_bytes; less than the kernel declares is a fault, not an overrun.
#define PF_SHARED(bytes)                                               \
    extern __shared__ __align__(16) unsigned char shared_storage[];    \
    unsigned char* const shared_memory = shared_storage;               \
    if (dynamic_shared_bytes() < (bytes)) __trap()

#define INFINITE __int_as_float(0x7f800000)

constexpr unsigned ALL_LANES = 0xffffffffu;

PF_DEVICE unsigned dynamic_shared_bytes() {
    unsigned bytes;
    asm("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
    return bytes;
}

PF_DEVICE int thread_index() { return threadIdx.x; }
PF_DEVICE int program_index() { return blockIdx.x; }
PF_DEVICE int uniform(int x) { return x; }
PF_DEVICE void barrier() {
#ifndef PF_WITHOUT_BARRIERS  // a negative control for racecheck
    __syncthreads();
#endif
}
PF_DEVICE void schedule_fence() {}
PF_DEVICE void settle(float&) {}

PF_DEVICE float as_float(uint32 x) { return __uint_as_float(x); }
PF_DEVICE uint32 as_uint(float x) { return __float_as_uint(x); }

template <int MASK>
PF_DEVICE uint32 lane_xor(uint32 x) {
    return __shfl_xor_sync(ALL_LANES, x, MASK);
}
PF_DEVICE bool any_lane(bool x) { return __any_sync(ALL_LANES, x); }

PF_DEVICE float exp2_of(float x) { return exp2f(x); }
PF_DEVICE float log2_of(float x) { return log2f(x); }
PF_DEVICE float max_of(float a, float b) { return fmaxf(a, b); }
PF_DEVICE float min_of(float a, float b) { return fminf(a, b); }
PF_DEVICE float fma_of(float a, float b, float c) { return fmaf(a, b, c); }

PF_DEVICE uint16 half_bits(float x) {
    uint16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
PF_DEVICE float float_of_half(uint16 bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

PF_DEVICE uint32 byte_permute(uint32 a, uint32 b, uint32 selectors) {
    const uint32 nibbles = (selectors & 7u) | (selectors >> 4 & 0x70u) | (selectors >> 8 & 0x700u) | (selectors >> 12 & 0x7000u);
    return __byte_perm(b, a, nibbles);
}

PF_DEVICE float dot2(uint32 a, uint32 b, float c) {
    c = fma_of(float_of_half(static_cast<uint16>(a)), float_of_half(static_cast<uint16>(b)), c);
    return fma_of(float_of_half(static_cast<uint16>(a >> 16)), float_of_half(static_cast<uint16>(b >> 16)), c);
}

// ------------------------------------------------------------------ RDNA's matrix instructions; calls, because they are long
template <class T>
PF_DEVICE float element_of(uint32 pair, int i) {
    const uint16 bits = static_cast<uint16>(pair >> (i % 2 * 16));
    if constexpr (same<T, Float16>) return float_of_half(bits);
    else return as_float(static_cast<uint32>(bits) << 16);
}

template <class T>
__device__ __noinline__ Vector<float, 8> wmma_gfx11(Vector<uint32, 8> a, Vector<uint32, 8> b, Vector<float, 8> c) {
    const int group = threadIdx.x % 32 / 16;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
        const float right = element_of<T>(b.data[k / 2], k);
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const uint32 left = __shfl_sync(ALL_LANES, a.data[k / 2], 2 * r + group);
            c.data[r] = fma_of(element_of<T>(left, k), right, c.data[r]);
        }
    }
    return c;
}

template <class T>
__device__ __noinline__ Vector<float, 8> wmma_gfx12(Vector<uint32, 4> a, Vector<uint32, 4> b, Vector<float, 8> c) {
    const int lane = threadIdx.x % 32, group = lane / 16;
#pragma unroll
    for (int k = 0; k < 16; ++k) {
        const int half = k / 8, dword = k % 8 / 2;
        const float right = element_of<T>(__shfl_sync(ALL_LANES, b.data[dword], lane % 16 + 16 * half), k);
#pragma unroll
        for (int r = 0; r < 8; ++r) {
            const uint32 left = __shfl_sync(ALL_LANES, a.data[dword], group * 8 + r + 16 * half);
            c.data[r] = fma_of(element_of<T>(left, k), right, c.data[r]);
        }
    }
    return c;
}
