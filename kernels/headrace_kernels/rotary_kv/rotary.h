// After the projection to queries, keys and values: norms of heads, rotation by position, and the write to the blocks.
#ifndef HEADRACE_ROTARY_KV_H
#define HEADRACE_ROTARY_KV_H

#include "../paged_attention/attention.h"

namespace hr {

struct RotaryOptions {  // mirrored in native/structs.py
  const float* cosines;  // [positions][dims / 2], null: no rotation
  const float* sines;
  int32_t dims;         // of a head that are rotated: (i, i + dims / 2) for i < dims / 2
  int32_t interleaved;  // pairs are (2 i, 2 i + 1)
  const float* q_norm;  // [k_dim] RMS norm of each query head before the rotation, null: none
  const float* k_norm;
  float epsilon;
};

// qkv[tokens][heads * k_dim + kv_heads * k_dim + kv_heads * v_dim]: queries are rotated in place, keys and values of
// token t go to slot slots[t] = block * block_size + offset, rounded to the cache's type. Bytes are multiples of a
// 127th of the head's largest element; a head with NaN or infinity has a scale of NaN.
void rotary_kv_write(const AttentionShape& shape, const RotaryOptions& options, float* qkv, int tokens,
                     const int64_t* positions, const int64_t* slots, const KvCache& cache);

}  // namespace hr

#endif
