// The sizes and strides of one launch, in elements. `arguments.py` builds the same structure; a test compares their layouts.
#pragma once

struct Strides3 {
    int64 batch, head, row;
};
struct Strides4 {
    int64 batch, head, row, column;
};

struct Call {
    Strides3 query, key, value, out, grad_out, dquery, dkey, dvalue, grad_lse;
    Strides4 bias, mask, dbias;  // 0 along dimensions of size 1
    int64 lse_batch, lse_head;   // of lse and delta; rows are contiguous
    int64 alibi_batch, alibi_head;
    int64 total_q, total_k;  // rows of packed tensors
    float scale, softcap;
    int32 bias_rows, bias_columns, mask_rows, mask_columns;  // bounds of positions, 2**31 - 1 along dimensions of size 1
    int32 num_blocks, num_heads, heads_per_group;            // order of programs: see program_block
    int32 batch, heads_q, heads_k, group, seqlen_q, seqlen_k;
    int32 window_left, window_right;
    int32 m_tiles, n_tiles, bias_heads;  // tiles of the bias gradient
};

// Every kernel takes the same arguments, those it does not use being null, so that one launcher serves all.
#define PF_ARGUMENTS                                                                                                      \
    const void *__restrict__ query, const void *__restrict__ key, const void *__restrict__ value, void *__restrict__ out, \
        float *__restrict__ lse, const void *__restrict__ grad_out, const float *__restrict__ grad_lse,                   \
        float *__restrict__ delta, void *__restrict__ dquery, void *__restrict__ dkey, void *__restrict__ dvalue,         \
        float *__restrict__ dbias, const void *__restrict__ bias, const uint8 *__restrict__ mask,                         \
        const float *__restrict__ alibi_slopes, const float *__restrict__ sinks, const void *__restrict__ cu_seqlens_q,   \
        const void *__restrict__ cu_seqlens_k, const Call call
