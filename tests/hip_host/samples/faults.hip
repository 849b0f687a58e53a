// One fault each, which the harness must report. PF_FAULT says which.
#include "platform.h"
#include "call.h"

PF_KERNEL(128) void faults(PF_ARGUMENTS) {
    PF_SHARED(512);
    uint32* const shared = reinterpret_cast<uint32*>(shared_memory);
    float* const to = static_cast<float*>(out);
    const int i = thread_index();
    const uint32 one = static_cast<const uint32*>(query)[0];  // 1, unknown to the compiler
    if (PF_FAULT == 0) shared[i + one] = 0;                   // beyond shared memory
    if (PF_FAULT == 1) to[i] = static_cast<const float*>(key)[i];                       // beyond a tensor that is read
    if (PF_FAULT == 2) to[i + one] = 1.0f;                                              // beyond one that is written
    if (PF_FAULT == 3) shared[i] = i, to[i] = shared[(i + 64) % 128];                   // another wave's, no barrier
    if (PF_FAULT == 4) shared[i] = i, to[i] = shared[i ^ 1];                            // another lane's, no exchange or barrier
    if (PF_FAULT == 5) to[i] = shared[(i + 64) % 128], shared[i] = i;                   // written while it is read
    if (PF_FAULT == 6) shared[0] = 7;                                                   // written by all
    if (PF_FAULT == 7) to[i] = i % 2 ? lane_xor<1>(one) : lane_xor<2>(one);             // lanes part
    if (PF_FAULT == 8 && i % 2) to[i] = lane_xor<1>(one);                               // some lanes stay away
    if (PF_FAULT == 9 && i < 64) barrier();                                             // a wave stays away
    if (PF_FAULT == 10 && i < 7) return;
    if (PF_FAULT == 10) barrier();                                                      // some lanes have ended
    if (PF_FAULT == 11) to[uniform(i)] = 0.0f;                                          // not uniform
    if (PF_FAULT == 12) to[i] = 0x7fffffff + static_cast<int>(one);                     // undefined behaviour
    if (PF_FAULT == 13) to[i] = as_float(reinterpret_cast<Vector<uint32, 4>*>(shared + one)->data[0]);  // misaligned
    if (PF_FAULT == 14) static_cast<float*>(const_cast<void*>(query))[0] = 1.0f;        // an input
    if (PF_FAULT == 15) to[0] = 1.0f;                                                   // an output by all
    if (PF_FAULT == 16) {
        Vector<uint32, 4> local = {{0, 0, 0, 0}};
        for (uint32 j = 0; j < 4 + one; ++j) local.data[j] = j;                         // beyond a local array
        to[i] = local.data[one];
    }
    if (PF_FAULT == 17) while (one) barrier();                                           // without end
}
