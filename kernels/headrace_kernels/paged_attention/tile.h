// The two products of one tile of keys, in registers.
#ifndef HEADRACE_ATTENTION_TILE_H
#define HEADRACE_ATTENTION_TILE_H

#include "kv_element.h"

namespace hr {

constexpr int KEY_VECTORS = TILE_KEYS / LANES;
// AVX-512 holds 6 x 4 sums, AVX2 3 x 2.
constexpr int TILE_ROWS = REGISTERS >= 32 ? 6 : 3;
constexpr int TILE_VECTORS = REGISTERS >= 32 ? 4 : 2;

// Sixteen keys: dimension i at base + i * stride.
template <class Kv>
struct KeyVector {
  const typename Kv::Element* base;
  int64_t stride;
};

// scores[r][64 keys from first * 16 on] = q[r] . k. `next` (or null): keys that are fetched meanwhile, as many.
template <class Kv, int MR, int NV>
HR_INLINE void score_block(const float* const* q, const KeyVector<Kv>* keys, const KeyVector<Kv>* next, int k_dim,
                           float* scores) {
  F16 acc[MR][NV];
  repeat<MR>([&](auto r) HR_LAMBDA { repeat<NV>([&](auto v) HR_LAMBDA { acc[r][v] = zero(); }); });
  for (int i = 0; i < k_dim; i++) {
    F16 k[NV];
    repeat<NV>([&](auto v) HR_LAMBDA { k[v] = Kv::load(keys[v].base + i * keys[v].stride); });
    if (next) repeat<NV>([&](auto v) HR_LAMBDA { __builtin_prefetch(next[v].base + i * next[v].stride, 0, 2); });
    repeat<MR>([&](auto r) HR_LAMBDA {
      F16 a = set1(q[r][i]);
      repeat<NV>([&](auto v) HR_LAMBDA { acc[r][v] = fma(a, k[v], acc[r][v]); });
    });
  }
  repeat<MR>([&](auto r) HR_LAMBDA {
    repeat<NV>([&](auto v) HR_LAMBDA { store(scores + r * TILE_KEYS + v * LANES, acc[r][v]); });
  });
}

template <class Kv, int MR>
void score_rows(const float* const* q, const KeyVector<Kv>* keys, const KeyVector<Kv>* next, int key_vectors, int k_dim,
                float* scores) {
  int v = 0;
  for (; v + TILE_VECTORS <= key_vectors; v += TILE_VECTORS)
    score_block<Kv, MR, TILE_VECTORS>(q, keys + v, next ? next + v : nullptr, k_dim, scores + v * LANES);
  for (; v < key_vectors; v++) score_block<Kv, MR, 1>(q, keys + v, nullptr, k_dim, scores + v * LANES);
}

// out[r] = out[r] * decay[r] + weights[r] . values, NV registers of columns from `column` on. `next` as above.
template <class Kv, int MR, int NV>
HR_INLINE void value_block(const float* weights, const typename Kv::Element* const* values,
                           const typename Kv::Element* const* next, int keys, int column, const float* decay, float* out,
                           int64_t ld_out) {
  F16 acc[MR][NV];
  repeat<MR>([&](auto r) HR_LAMBDA {
    repeat<NV>([&](auto v) HR_LAMBDA {
      acc[r][v] = mul(load(out + r * ld_out + column + v * LANES), set1(decay[r]));
    });
  });
  for (int j = 0; j < keys; j++) {
    F16 value[NV];
    repeat<NV>([&](auto v) HR_LAMBDA { value[v] = Kv::load(values[j] + column + v * LANES); });
    if (next) repeat<NV>([&](auto v) HR_LAMBDA { __builtin_prefetch(next[j] + column + v * LANES, 0, 2); });
    repeat<MR>([&](auto r) HR_LAMBDA {
      F16 p = set1(weights[r * TILE_KEYS + j]);
      repeat<NV>([&](auto v) HR_LAMBDA { acc[r][v] = fma(p, value[v], acc[r][v]); });
    });
  }
  repeat<MR>([&](auto r) HR_LAMBDA {
    repeat<NV>([&](auto v) HR_LAMBDA { store(out + r * ld_out + column + v * LANES, acc[r][v]); });
  });
}

// The columns that do not fill a register.
template <class Kv>
void value_tail(int rows, const float* weights, const typename Kv::Element* const* values, int keys, int column, int width,
                const float* decay, float* out, int64_t ld_out) {
  for (int r = 0; r < rows; r++) {
    F16 acc = mul(load(out + r * ld_out + column), set1(decay[r]));
    for (int j = 0; j < keys; j++)
      acc = fma(set1(weights[r * TILE_KEYS + j]), load_kv<Kv>(values[j] + column, width), acc);
    store(out + r * ld_out + column, acc);
  }
}

template <class Kv, int MR>
void value_rows(const float* weights, const typename Kv::Element* const* values,
                const typename Kv::Element* const* next, int keys, int v_dim, const float* decay, float* out,
                int64_t ld_out) {
  int column = 0;
  for (; column + TILE_VECTORS * LANES <= v_dim; column += TILE_VECTORS * LANES)
    value_block<Kv, MR, TILE_VECTORS>(weights, values, next, keys, column, decay, out, ld_out);
  for (; column + LANES <= v_dim; column += LANES)
    value_block<Kv, MR, 1>(weights, values, next, keys, column, decay, out, ld_out);
  if (column < v_dim) value_tail<Kv>(MR, weights, values, keys, column, v_dim - column, decay, out, ld_out);
}

}  // namespace hr

#endif
