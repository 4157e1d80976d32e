// How a key or value is kept in its block: sixteen at a time in and out of registers of fp32.
#ifndef HEADRACE_KV_ELEMENT_H
#define HEADRACE_KV_ELEMENT_H

#include "attention.h"

namespace hr {

struct KvFloat {
  using Element = float;
  static constexpr bool SCALED = false;
  static HR_INLINE F16 load(const float* p) { return hr::load(p); }
  static HR_INLINE void store(float* p, F16 v) { hr::store(p, v); }
};

struct KvHalf {
  using Element = uint16_t;
  static constexpr bool SCALED = false;
  static HR_INLINE F16 load(const uint16_t* p) { return load_half(p); }
  // What is too large becomes the largest; NaN stays.
  static HR_INLINE void store(uint16_t* p, F16 v) { store_half(p, min(set1(65504.0f), max(set1(-65504.0f), v))); }
};

struct KvBfloat {
  using Element = uint16_t;
  static constexpr bool SCALED = false;
  static HR_INLINE F16 load(const uint16_t* p) { return load_bfloat(p); }
  static HR_INLINE void store(uint16_t* p, F16 v) { store_bfloat(p, v); }
};

// Times a scale that each head of each token has for its keys and another for its values.
struct KvByte {
  using Element = int8_t;
  static constexpr bool SCALED = true;
  static HR_INLINE F16 load(const int8_t* p) { return load_bytes(p); }
  static HR_INLINE void store(int8_t* p, F16 v) { store_bytes(p, to_int(v)); }
};

// The first n elements; the other lanes are zero.
template <class Kv> HR_INLINE F16 load_kv(const typename Kv::Element* p, int n) {
  if (n == LANES) return Kv::load(p);
  typename Kv::Element lanes[LANES] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof lanes[0]);
  return Kv::load(lanes);
}

// Calls f(Kv{}) for the type of a cache.
template <class F> void with_kv(int32_t type, F&& f) {
  switch (type) {
    case KV_F16: return f(KvHalf{});
    case KV_BF16: return f(KvBfloat{});
    case KV_INT8: return f(KvByte{});
    default: return f(KvFloat{});
  }
}

}  // namespace hr

#endif
