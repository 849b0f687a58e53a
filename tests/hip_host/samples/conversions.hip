// out[i] = binary16 of query[i]; dquery[i] = float of key[i]; dkey[i] = the bytes of two words that a third selects.
#include "platform.h"
#include "call.h"

PF_KERNEL(64) void conversions(PF_ARGUMENTS) {
    const int i = program_index() * 64 + thread_index();
    static_cast<uint16*>(out)[i] = half_bits(static_cast<const float*>(query)[i]);
    static_cast<float*>(dquery)[i] = float_of_half(static_cast<const uint16*>(key)[i]);
    const uint32* words = static_cast<const uint32*>(value);
    static_cast<uint32*>(dkey)[i] = byte_permute(words[0], words[1], words[2]);
}
