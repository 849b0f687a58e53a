// AMD GPUs: compiler builtins only, so that clang without ROCm, hipcc and hiprtc compile the same text.
#pragma once

#define PF_DEVICE __attribute__((device, always_inline)) inline
#if PF_WAVES_PER_EU > 0
#define PF_KERNEL(threads) \
    extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads), amdgpu_waves_per_eu(PF_WAVES_PER_EU)))
#else
#define PF_KERNEL(threads) extern "C" __attribute__((global, amdgpu_flat_work_group_size(threads, threads)))
#endif
#define PF_SHARED(bytes)                                                       \
    __attribute__((shared, aligned(16))) unsigned char shared_storage[bytes];  \
    unsigned char* const shared_memory = shared_storage

PF_DEVICE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
PF_DEVICE int uniform(int x) { return __builtin_amdgcn_readfirstlane(x); }
PF_DEVICE int program_index() { return __builtin_amdgcn_workgroup_id_x(); }

PF_DEVICE void barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}

PF_DEVICE void schedule_fence() {
#if __has_builtin(__builtin_amdgcn_sched_barrier)
    __builtin_amdgcn_sched_barrier(0);
#endif
}

PF_DEVICE void settle(float& x) { asm volatile("" : "+v"(x)); }

PF_DEVICE float as_float(uint32 x) { return __builtin_bit_cast(float, x); }
PF_DEVICE uint32 as_uint(float x) { return __builtin_bit_cast(uint32, x); }

template <int MASK>
PF_DEVICE uint32 lane_xor(uint32 x) {
#if PF_WAVE == 32 && !defined(__GFX9__)
    if constexpr (MASK == 16) return __builtin_amdgcn_permlanex16(x, x, 0x76543210, 0xfedcba98, false, false);
#endif
    if constexpr (MASK < 32) return __builtin_amdgcn_ds_swizzle(x, (MASK << 10) | 0x1f);
    const uint32 lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0));
    return __builtin_amdgcn_ds_bpermute((lane ^ MASK) << 2, x);
}

PF_DEVICE bool any_lane(bool x) {
#if !__has_builtin(__builtin_amdgcn_ballot_w64)
    return __builtin_amdgcn_uicmp(static_cast<uint32>(x), 0u, 33) != 0;  // before clang 16; 33: not equal
#elif PF_WAVE == 32
    return __builtin_amdgcn_ballot_w32(x) != 0;
#else
    return __builtin_amdgcn_ballot_w64(x) != 0;
#endif
}

PF_DEVICE float exp2_of(float x) {
#if __has_builtin(__builtin_amdgcn_exp2f)
    return __builtin_amdgcn_exp2f(x);
#else
    return __builtin_exp2f(x);
#endif
}

PF_DEVICE float log2_of(float x) {
#if __has_builtin(__builtin_amdgcn_logf)
    return __builtin_amdgcn_logf(x);
#else
    return __builtin_log2f(x);
#endif
}

PF_DEVICE float max_of(float a, float b) { return __builtin_fmaxf(a, b); }
PF_DEVICE float min_of(float a, float b) { return __builtin_fminf(a, b); }
PF_DEVICE float fma_of(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

PF_DEVICE uint16 half_bits(float x) { return __builtin_bit_cast(uint16, static_cast<_Float16>(x)); }
PF_DEVICE float float_of_half(uint16 bits) { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); }

PF_DEVICE uint32 byte_permute(uint32 a, uint32 b, uint32 selectors) { return __builtin_amdgcn_perm(a, b, selectors); }

using half2_t = _Float16 __attribute__((ext_vector_type(2)));

PF_DEVICE float dot2(uint32 a, uint32 b, float c) {
#if defined(__gfx906__) || defined(__gfx908__) || defined(__gfx1011__) || defined(__gfx1012__) || defined(__gfx1030__) || \
    defined(__gfx1031__) || defined(__gfx1032__) || defined(__gfx1034__) || defined(__gfx1035__) || defined(__gfx1036__)
    return __builtin_amdgcn_fdot2(__builtin_bit_cast(half2_t, a), __builtin_bit_cast(half2_t, b), c, false);
#else
    c = fma_of(float_of_half(static_cast<uint16>(a)), float_of_half(static_cast<uint16>(b)), c);
    return fma_of(float_of_half(static_cast<uint16>(a >> 16)), float_of_half(static_cast<uint16>(b >> 16)), c);
#endif
}

#if PF_MATRIX == PF_MATRIX_MFMA
using half4_t = _Float16 __attribute__((ext_vector_type(4)));
using half8_t = _Float16 __attribute__((ext_vector_type(8)));
using short2_t = short __attribute__((ext_vector_type(2)));
using short4_t = short __attribute__((ext_vector_type(4)));
using float4_t = float __attribute__((ext_vector_type(4)));
using float16_t = float __attribute__((ext_vector_type(16)));

template <class T, int SIDE, int DEPTH, int E, int ACC>
PF_DEVICE Vector<float, ACC> mfma(Vector<uint32, E> a, Vector<uint32, E> b, Vector<float, ACC> c) {
#define PF_MFMA(builtin, operand, accumulator)                                                                          \
    __builtin_bit_cast(Vector<float, ACC>, builtin(__builtin_bit_cast(operand, a), __builtin_bit_cast(operand, b),      \
                                                   __builtin_bit_cast(accumulator, c), 0, 0, 0))
    constexpr bool half = same<T, Float16>, bfloat = same<T, BFloat16>;
    if constexpr (half && SIDE == 16 && DEPTH == 16) return PF_MFMA(__builtin_amdgcn_mfma_f32_16x16x16f16, half4_t, float4_t);
    if constexpr (half && SIDE == 32 && DEPTH == 8) return PF_MFMA(__builtin_amdgcn_mfma_f32_32x32x8f16, half4_t, float16_t);
    if constexpr (!half && !bfloat && SIDE == 16) return PF_MFMA(__builtin_amdgcn_mfma_f32_16x16x4f32, float, float4_t);
    if constexpr (!half && !bfloat && SIDE == 32) return PF_MFMA(__builtin_amdgcn_mfma_f32_32x32x2f32, float, float16_t);
#if defined(__gfx908__)
    if constexpr (bfloat && SIDE == 16 && DEPTH == 8) return PF_MFMA(__builtin_amdgcn_mfma_f32_16x16x8bf16, short2_t, float4_t);
    if constexpr (bfloat && SIDE == 32 && DEPTH == 4) return PF_MFMA(__builtin_amdgcn_mfma_f32_32x32x4bf16, short2_t, float16_t);
#else
    if constexpr (bfloat && SIDE == 16 && DEPTH == 16) return PF_MFMA(__builtin_amdgcn_mfma_f32_16x16x16bf16_1k, short4_t, float4_t);
    if constexpr (bfloat && SIDE == 32 && DEPTH == 8) return PF_MFMA(__builtin_amdgcn_mfma_f32_32x32x8bf16_1k, short4_t, float16_t);
#endif
#if defined(__gfx950__)
    using bfloat8_t = __bf16 __attribute__((ext_vector_type(8)));
    if constexpr (half && SIDE == 16 && DEPTH == 32) return PF_MFMA(__builtin_amdgcn_mfma_f32_16x16x32_f16, half8_t, float4_t);
    if constexpr (half && SIDE == 32 && DEPTH == 16) return PF_MFMA(__builtin_amdgcn_mfma_f32_32x32x16_f16, half8_t, float16_t);
    if constexpr (bfloat && SIDE == 16 && DEPTH == 32) return PF_MFMA(__builtin_amdgcn_mfma_f32_16x16x32_bf16, bfloat8_t, float4_t);
    if constexpr (bfloat && SIDE == 32 && DEPTH == 16) return PF_MFMA(__builtin_amdgcn_mfma_f32_32x32x16_bf16, bfloat8_t, float16_t);
#endif
#undef PF_MFMA
}
#endif

#if PF_MATRIX == PF_MATRIX_WMMA11 || PF_MATRIX == PF_MATRIX_WMMA12
using half8_t = _Float16 __attribute__((ext_vector_type(8)));
using half16_t = _Float16 __attribute__((ext_vector_type(16)));
using short8_t = short __attribute__((ext_vector_type(8)));
using short16_t = short __attribute__((ext_vector_type(16)));
using float8_t = float __attribute__((ext_vector_type(8)));

#define PF_WMMA(builtin, operand)                                                                                \
    __builtin_bit_cast(Vector<float, 8>, builtin(__builtin_bit_cast(operand, a), __builtin_bit_cast(operand, b), \
                                                 __builtin_bit_cast(float8_t, c)))
#if PF_MATRIX == PF_MATRIX_WMMA11
template <class T>
PF_DEVICE Vector<float, 8> wmma_gfx11(Vector<uint32, 8> a, Vector<uint32, 8> b, Vector<float, 8> c) {
    if constexpr (same<T, Float16>) return PF_WMMA(__builtin_amdgcn_wmma_f32_16x16x16_f16_w32, half16_t);
    else return PF_WMMA(__builtin_amdgcn_wmma_f32_16x16x16_bf16_w32, short16_t);
}
#else
template <class T>
PF_DEVICE Vector<float, 8> wmma_gfx12(Vector<uint32, 4> a, Vector<uint32, 4> b, Vector<float, 8> c) {
    if constexpr (same<T, Float16>) return PF_WMMA(__builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12, half8_t);
    else return PF_WMMA(__builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12, short8_t);
}
#endif
#undef PF_WMMA
#endif
