// How weights lie in memory, and how a register of sixteen of them is made.
//
// A matrix W[N, K] is cut into panels of 32 rows (output columns); N is padded with zeros. Inside a panel everything
// lies in the order of k, so a product reads it front to back:
//   dense   [K][32] elements
//   Q8_0    for each 32 k: d[32] as fp16, then [8][32] words of four k's, each stored as q + 128
//   Q4_0    for each 32 k: d[32] as fp16, then [4][32] words of eight k's: k = 0…3 in the low nibbles of the four
//           bytes, k = 4…7 in the high ones
//   Q4_1    the same with m[32] as fp16 after d
// The weights are those of GGUF: d (q - 8), d q + m, d q. All are exact in fp32 (11 bits times at most 8), so fma(q, d, m)
// with m = -8 d or -128 d has the bits of weights inflated beforehand.
#ifndef HEADRACE_MATMUL_STORAGE_H
#define HEADRACE_MATMUL_STORAGE_H

#include <cstddef>
#include <cstdint>

#include "../native/simd.h"

namespace hr {

constexpr int PANEL = 32;
constexpr int QUANT_GROUP = 32;

enum Storage : int32_t { STORAGE_F32 = 0, STORAGE_BF16 = 1, STORAGE_F16 = 2, STORAGE_Q8_0 = 3, STORAGE_Q4_0 = 4, STORAGE_Q4_1 = 5 };

// Each policy: STEP k's per panel group, CHUNK k's per load of words; NV registers of sixteen columns are made from
// `column` on. bytes(k) is the offset of row k inside a panel (k a multiple of STEP).

template <class T, F16 (*LOAD)(const T*)>
struct Dense {
  static constexpr int STEP = 1, CHUNK = 1;
  struct Scale {};
  using Words = F16;
  static HR_INLINE size_t bytes(int k) { return static_cast<size_t>(k) * PANEL * sizeof(T); }
  static HR_INLINE Scale scale(const uint8_t*, int) { return {}; }
  static HR_INLINE Words words(const uint8_t* group, int, int column) {
    return LOAD(reinterpret_cast<const T*>(group) + column);
  }
  template <int> static HR_INLINE F16 weight(const Words& w, const Scale&) { return w; }
};
using Float32 = Dense<float, load>;
using BFloat16 = Dense<uint16_t, load_bfloat>;
using Float16 = Dense<uint16_t, load_half>;

struct ScaleAndMinimum { F16 d, m; };

struct Q8_0 {
  static constexpr int STEP = QUANT_GROUP, CHUNK = 4, HEADER = PANEL * 2, GROUP_BYTES = HEADER + 8 * PANEL * 4;
  using Scale = ScaleAndMinimum;
  using Words = I16;
  static HR_INLINE size_t bytes(int k) { return static_cast<size_t>(k / QUANT_GROUP) * GROUP_BYTES; }
  static HR_INLINE Scale scale(const uint8_t* group, int column) {
    F16 d = load_half(reinterpret_cast<const uint16_t*>(group) + column);
    return {d, mul(d, set1(-128.0f))};
  }
  static HR_INLINE Words words(const uint8_t* group, int chunk, int column) {
    return load_words(group + HEADER + (chunk * PANEL + column) * 4);
  }
  template <int J> static HR_INLINE F16 weight(const Words& w, const Scale& s) { return fma(byte<J>(w), s.d, s.m); }
};

template <bool MINIMUM>
struct Q4 {
  static constexpr int STEP = QUANT_GROUP, CHUNK = 8, HEADER = PANEL * (MINIMUM ? 4 : 2);
  static constexpr int GROUP_BYTES = HEADER + 4 * PANEL * 4;
  using Scale = ScaleAndMinimum;
  using Words = I16;
  static HR_INLINE size_t bytes(int k) { return static_cast<size_t>(k / QUANT_GROUP) * GROUP_BYTES; }
  static HR_INLINE Scale scale(const uint8_t* group, int column) {
    const uint16_t* half = reinterpret_cast<const uint16_t*>(group) + column;
    F16 d = load_half(half);
    if (MINIMUM) return {d, load_half(half + PANEL)};
    return {d, mul(d, set1(-8.0f))};
  }
  static HR_INLINE Words words(const uint8_t* group, int chunk, int column) {
    return load_words(group + HEADER + (chunk * PANEL + column) * 4);
  }
  static constexpr int shift(int j) { return 8 * (j % 4) + 4 * (j / 4); }
  template <int J> static HR_INLINE F16 weight(const Words& w, const Scale& s) {
    return fma(nibble<shift(J)>(w), s.d, s.m);
  }
};
using Q4_0 = Q4<false>;
using Q4_1 = Q4<true>;

// Calls f(policy) with the policy of a storage.
template <class F>
HR_INLINE auto with_storage(int storage, F&& f) {
  switch (storage) {
    case STORAGE_BF16: return f(BFloat16{});
    case STORAGE_F16: return f(Float16{});
    case STORAGE_Q8_0: return f(Q8_0{});
    case STORAGE_Q4_0: return f(Q4_0{});
    case STORAGE_Q4_1: return f(Q4_1{});
    default: return f(Float32{});
  }
}

inline size_t panel_bytes(int storage, int k) {
  return with_storage(storage, [&](auto policy) { return decltype(policy)::bytes(k); });
}
inline int panel_count(int n) { return (n + PANEL - 1) / PANEL; }

}  // namespace hr

#endif
