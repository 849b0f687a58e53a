// What the kernels need from a machine: identity, barriers, exchange between lanes, a few functions of the hardware.
//
// Three machines: AMD GPUs (compiled by clang or hiprtc, without any HIP header), NVIDIA GPUs (NVRTC, to run this source on
// real hardware) and the host (the tests' SIMT harness). Each header defines the same names:
//
//   PF_DEVICE                            marks a device function
//   PF_KERNEL(threads)                   marks a kernel; PF_WAVES_PER_EU 0 leaves occupancy to the compiler
//   PF_SHARED(bytes)                     declares `unsigned char* const shared_memory`, the workgroup's LDS, 16-byte aligned
//   thread_index(), program_index()      of the work-item in its workgroup, of the workgroup in its launch
//   uniform(x)                           x, which is the same in all lanes of a wave, as a scalar
//   barrier()                            all work-items of the workgroup arrive; what they wrote to shared memory is seen
//   schedule_fence()                     the compiler moves no instruction across: a bound on how many loads it starts early
//   settle(x)                            x is computed before the next schedule_fence (which holds back loads, not arithmetic)
//   lane_xor<MASK>(x)                    x (uint32) of lane own ^ MASK; all lanes of the wave take part
//   any_lane(x)                          whether x holds in some lane of the wave; the same
//   exp2_of(x), log2_of(x)               the hardware's instructions
//   max_of, min_of, fma_of               of floats
//   as_float(x), as_uint(x)              bits of a float, and back
//   byte_permute(a, b, selectors)        bytes of b (selectors 0..3) and a (4..7), lowest selector byte first
//   half_bits(x), float_of_half(bits)    float to IEEE binary16 and back, to nearest even
//   dot2(a, b, c)                        c + a.lo * b.lo + a.hi * b.hi of packed binary16
//   mfma<T, SIDE, DEPTH>(a, b, c)        CDNA's matrix instructions, wave 64
//   wmma_gfx11<T>(a, b, c), wmma_gfx12<T>(a, b, c)    RDNA's, wave 32, 16x16x16
//
// Lane layouts of the matrix instructions (AMD's matrix instruction calculator and ISA manuals; C and D are alike):
//   mfma        E = SIDE * DEPTH / 64 elements a lane, g = lane / SIDE.
//               A: row lane % SIDE, k = g * E + i.  B: column lane % SIDE, k = g * E + i.
//               C: column lane % SIDE, row (r / 4) * (256 / SIDE) + g * 4 + r % 4.
//   wmma_gfx11  A: row lane % 16, k = i of 16; lanes 16..31 hold what lanes 0..15 hold.  B alike by columns.
//               C: column lane % 16, row 2 * r + lane / 16.
//   wmma_gfx12  A: row lane % 16, k = (lane / 16) * 8 + i.  B alike by columns.  C: column lane % 16, row (lane / 16) * 8 + r.
#pragma once

using int8 = signed char;
using uint8 = unsigned char;
using uint16 = unsigned short;
using int32 = int;
using uint32 = unsigned int;
using int64 = long long;
using uint64 = unsigned long long;

// N values of T in registers, aligned so that a load or store of all of them is one access.
template <class T, int N>
struct alignas(sizeof(T) * N > 16 ? 16 : sizeof(T) * N) Vector {
    T data[N];
};

template <class A, class B>
constexpr bool same = false;
template <class A>
constexpr bool same<A, A> = true;

struct Float16 {
    static constexpr int bytes = 2;
};
struct BFloat16 {
    static constexpr int bytes = 2;
};
struct Float32 {
    static constexpr int bytes = 4;
};

// A host compiler that knows PF_HOST brings platform_host.h of the tests, NVRTC platform_cuda.h of the tests.
#if defined(PF_HOST)
#include "platform_host.h"
#elif defined(__CUDACC__)
#include "platform_cuda.h"
#else
#include "platform_amd.h"
#endif
