// A whole decoder of the Llama family as plain data, and one step through it. Mirrored in decoder_step/layout.py.
#ifndef HEADRACE_DECODER_H
#define HEADRACE_DECODER_H

#include "../gated_activation/activation.h"
#include "../matmul/product.h"
#include "../paged_attention/attention.h"
#include "../rotary_kv/rotary.h"

namespace hr {

struct Layer {
  Weight qkv;      // [heads * k_dim + kv_heads * k_dim + kv_heads * v_dim, hidden]
  Weight output;   // [hidden, heads * v_dim]
  Weight gate_up;  // panels of 32 gates and of 32 ups in turn, both padded to whole panels
  Weight down;     // [hidden, intermediate]
  const float* attention_norm;       // [hidden] each; null where the family has none
  const float* attention_post_norm;  // of the block's result, before its residual
  const float* mlp_norm;
  const float* mlp_post_norm;
  RotaryOptions rotary;
  AttentionOptions attention;
  KvCache cache;
};

struct Decoder {
  int32_t hidden, intermediate, layer_count, activation;
  float epsilon, embedding_scale, residual_scale, logit_scale, logit_softcap;  // softcap 0: none
  AttentionShape shape;
  const Layer* layers;
  const Weight* embedding;  // [vocabulary, hidden]
  const Weight* head;
  const float* final_norm;
};

// Of a step's time; the names are those of decoder_step/__init__.py.
enum Part { PART_EMBEDDING, PART_NORM, PART_QKV, PART_ROTARY, PART_ATTENTION, PART_OUTPUT, PART_GATE_UP,
            PART_DOWN, PART_HEAD, PARTS };

struct Step {
  int32_t tokens, row_count;
  const int64_t* token_ids;  // [tokens]
  const int64_t* positions;
  const int64_t* slots;
  Sequences sequences;
  const int64_t* rows;  // [row_count]: packed tokens whose logits are wanted
  float* logits;        // [row_count][vocabulary]
  int64_t* nanoseconds; // [PARTS] grows by what each part took; null: nobody asks
};

}  // namespace hr

#endif
