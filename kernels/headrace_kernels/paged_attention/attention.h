// Attention over keys and values in blocks, read where they lie.
//
// A block of block_size tokens holds, for one layer,
//   keys    [kv_heads][k_dim][block_size]   sixteen keys side by side are one register: no sum across lanes
//   values  [kv_heads][block_size][v_dim]
// Elements are fp32, fp16, bf16, or bytes with a scale for each head of each token; they are widened in registers, and
// every query reads what was stored, its own step's keys and values included. Keys are taken in tiles of 64 aligned to positions 0, 64, 128, … with an online softmax, whatever the number of
// queries: prefill, decode and any chunking give the same bits. Within a tile a score is one chain of fused
// multiply-adds over k_dim, an output one over the keys in order; masked keys count as exact zeros.
#ifndef HEADRACE_ATTENTION_H
#define HEADRACE_ATTENTION_H

#include <cstdint>

#include "../native/row_sink.h"

namespace hr {

constexpr int TILE_KEYS = 64;

struct AttentionShape {  // mirrored in native/structs.py
  int32_t heads, kv_heads, k_dim, v_dim, block_size;
};

enum KvType : int32_t { KV_F32, KV_F16, KV_BF16, KV_INT8 };

struct KvCache {  // of one layer; mirrored in native/structs.py
  int32_t type;
  void* keys;
  void* values;
  float* key_scales;  // [blocks][kv_heads][block_size], of KV_INT8 only
  float* value_scales;
};

struct AttentionOptions {  // mirrored in native/structs.py
  float scale;
  float softcap;       // 0: none
  int32_t window;      // keys a query sees, itself included; 0: all
  const float* sinks;  // [heads] or null: a logit that takes part in the softmax and adds nothing
};

// The packed tokens of a step: sequence i owns tokens cu[i] … cu[i + 1] - 1 at positions starts[i], starts[i] + 1, …,
// and its blocks are tables[table_starts[i]], …
struct Sequences {  // mirrored in native/structs.py
  int32_t count;
  const int64_t* cu;
  const int64_t* starts;
  const int64_t* tables;
  const int64_t* table_starts;
};

// query: token t's head h at query + t * ld_query + h * k_dim. Column h * v_dim of row t of `out` gets its result.
void paged_attention(const AttentionShape& shape, const AttentionOptions& options, const Sequences& sequences,
                     const float* query, int64_t ld_query, const KvCache& cache, const RowSink& out);

}  // namespace hr

#endif
