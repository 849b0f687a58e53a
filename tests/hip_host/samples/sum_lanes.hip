// out[i] = sum over the wave of query[i], by exchanges; lse[i] = key[i] of the work-item before, through shared memory.
#include "platform.h"
#include "call.h"

PF_KERNEL(PF_WAVE * 2) void sum_lanes(PF_ARGUMENTS) {
    PF_SHARED(PF_WAVE * 2 * 4);
    const int i = thread_index(), first = program_index() * PF_WAVE * 2;
    float sum = static_cast<const float*>(query)[first + i];
    sum += as_float(lane_xor<1>(as_uint(sum)));
    sum += as_float(lane_xor<2>(as_uint(sum)));
    sum += as_float(lane_xor<4>(as_uint(sum)));
    sum += as_float(lane_xor<8>(as_uint(sum)));
    sum += as_float(lane_xor<16>(as_uint(sum)));
    if constexpr (PF_WAVE == 64) sum += as_float(lane_xor<32>(as_uint(sum)));
    static_cast<float*>(out)[first + i] = sum;
    float* const shared = reinterpret_cast<float*>(shared_memory);
    shared[i] = static_cast<const float*>(key)[first + i];
    barrier();
    lse[first + i] = shared[i == 0 ? PF_WAVE * 2 - 1 : i - 1];
}
