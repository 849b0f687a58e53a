// What the backward kernels share: S and P recomputed from lse (FlashAttention, Dao et al. 2022, Algorithm 4).
//   P = exp(S - lse),  dP = dO V^T,  dS = P * (dP - delta) * softcap'
//   dV = P^T dO,  dK = scale * dS^T Q,  dQ = scale * dS K,  dbias = dS (bias is added after the cap)
// Each output element is summed by one program in a fixed order: no atomics, repeatable bit for bit.
#pragma once

// lse of a row in UNIT; +inf, so that P = 0, for rows outside the sequence and rows that see no key.
// Rows outside read the last row instead: a branch here would part the products before it from their operands.
PF_DEVICE float lse_or_infinite(const float* lse, int row, int rows) {
    const float value = lse[least(row, rows - 1)];
    return row >= rows || value == -INFINITE ? INFINITE : value * UNIT;
}

PF_DEVICE float delta_or_zero(const float* delta, int row, int rows) {
    const float value = delta[least(row, rows - 1)];
    return row < rows ? value : 0.0f;
}

// P, at most 1 whatever the rounding of a huge lse; 0 where hidden (S is -inf there).
PF_DEVICE float probability(float s, float lse) { return exp_of(min_of(s - lse, 0.0f)); }

// CDNA 2's matrix unit takes 16-bit subnormals as 0, which P of a float16 call with some 16,000 keys is: there dV is summed from
// P times a power of two. (dS, which may be large as well as small, is scaled by the caller's loss scaling as on other GPUs.)
#if defined(__gfx90a__)
constexpr float P_FACTOR = same<Element, Float16> ? 4096.0f : 1.0f;
#else
constexpr float P_FACTOR = 1.0f;
#endif
