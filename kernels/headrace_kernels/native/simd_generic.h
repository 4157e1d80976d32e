// F16 as an array, for machines without AVX2. The loops are ones that compilers vectorise (NEON, for one).
// Included by simd.h.
#ifndef HEADRACE_SIMD_GENERIC_H
#define HEADRACE_SIMD_GENERIC_H

namespace hr {

constexpr const char* ISA = "generic";
constexpr int REGISTERS = 4;  // keeps the code small: this path is for compatibility

struct F16 { float v[16]; };
struct I16 { int32_t v[16]; };

float half_to_float(uint16_t);
float bfloat_to_float(uint16_t);
uint16_t float_to_half(float);

template <class R, class F> HR_INLINE R lanes(F&& f) {
  R out;
  for (int i = 0; i < LANES; i++) out.v[i] = f(i);
  return out;
}

HR_INLINE F16 set1(float x) { return lanes<F16>([&](int) { return x; }); }
HR_INLINE F16 zero() { return set1(0.0f); }
HR_INLINE F16 load(const float* p) { return lanes<F16>([&](int i) { return p[i]; }); }
HR_INLINE void store(float* p, F16 x) { std::memcpy(p, x.v, sizeof x.v); }
HR_INLINE F16 fma(F16 x, F16 y, F16 z) {
  return lanes<F16>([&](int i) { return __builtin_fmaf(x.v[i], y.v[i], z.v[i]); });
}
HR_INLINE F16 add(F16 x, F16 y) { return lanes<F16>([&](int i) { return x.v[i] + y.v[i]; }); }
HR_INLINE F16 sub(F16 x, F16 y) { return lanes<F16>([&](int i) { return x.v[i] - y.v[i]; }); }
HR_INLINE F16 mul(F16 x, F16 y) { return lanes<F16>([&](int i) { return x.v[i] * y.v[i]; }); }
HR_INLINE F16 div(F16 x, F16 y) { return lanes<F16>([&](int i) { return x.v[i] / y.v[i]; }); }
HR_INLINE F16 max(F16 x, F16 y) { return lanes<F16>([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; }); }
HR_INLINE F16 min(F16 x, F16 y) { return lanes<F16>([&](int i) { return x.v[i] < y.v[i] ? x.v[i] : y.v[i]; }); }
HR_INLINE F16 load_half(const uint16_t* p) { return lanes<F16>([&](int i) { return half_to_float(p[i]); }); }
HR_INLINE F16 load_bfloat(const uint16_t* p) { return lanes<F16>([&](int i) { return bfloat_to_float(p[i]); }); }
HR_INLINE void store_half(uint16_t* p, F16 x) {
  for (int i = 0; i < LANES; i++) p[i] = float_to_half(x.v[i]);
}
HR_INLINE F16 load_bytes(const int8_t* p) { return lanes<F16>([&](int i) { return static_cast<float>(p[i]); }); }

HR_INLINE I16 load_words(const void* p) {
  I16 out;
  std::memcpy(out.v, p, sizeof out.v);
  return out;
}
HR_INLINE void store_words(void* p, I16 x) { std::memcpy(p, x.v, sizeof x.v); }
HR_INLINE void store_bytes(void* p, I16 x) {
  for (int i = 0; i < LANES; i++) static_cast<int8_t*>(p)[i] = static_cast<int8_t>(x.v[i]);
}
HR_INLINE F16 to_float(I16 x) { return lanes<F16>([&](int i) { return static_cast<float>(x.v[i]); }); }
HR_INLINE I16 to_int(F16 x) {
  return lanes<I16>([&](int i) { return static_cast<int32_t>(__builtin_rintf(x.v[i])); });
}
HR_INLINE int32_t wrapping_add(int32_t x, int32_t y) {
  return static_cast<int32_t>(static_cast<uint32_t>(x) + static_cast<uint32_t>(y));
}
HR_INLINE I16 add(I16 x, I16 y) { return lanes<I16>([&](int i) { return wrapping_add(x.v[i], y.v[i]); }); }
HR_INLINE I16 max(I16 x, I16 y) { return lanes<I16>([&](int i) { return x.v[i] > y.v[i] ? x.v[i] : y.v[i]; }); }
HR_INLINE int32_t sum(I16 x) {
  int32_t total = 0;
  for (int i = 0; i < LANES; i++) total = wrapping_add(total, x.v[i]);
  return total;
}
HR_INLINE int32_t highest(I16 x) {
  int32_t top = x.v[0];
  for (int i = 1; i < LANES; i++) top = x.v[i] > top ? x.v[i] : top;
  return top;
}
HR_INLINE I16 set1_int(int32_t x) { return lanes<I16>([&](int) { return x; }); }
template <int N> HR_INLINE I16 shift_left(I16 x) {
  return lanes<I16>([&](int i) { return static_cast<int32_t>(static_cast<uint32_t>(x.v[i]) << N); });
}
HR_INLINE F16 as_float(I16 x) {
  F16 out;
  std::memcpy(out.v, x.v, sizeof out.v);
  return out;
}
HR_INLINE I16 magnitude_bits(F16 x) {
  I16 out;
  std::memcpy(out.v, x.v, sizeof out.v);
  return lanes<I16>([&](int i) { return out.v[i] & 0x7FFFFFFF; });
}
template <int SHIFT> HR_INLINE F16 nibble(I16 x) {
  return lanes<F16>([&](int i) { return static_cast<float>((static_cast<uint32_t>(x.v[i]) >> SHIFT) & 15u); });
}
template <int I> HR_INLINE F16 byte(I16 x) {
  return lanes<F16>([&](int i) { return static_cast<float>((static_cast<uint32_t>(x.v[i]) >> (8 * I)) & 255u); });
}
HR_INLINE F16 where_less(F16 x, F16 y, F16 yes, F16 no) {
  return lanes<F16>([&](int i) { return x.v[i] < y.v[i] ? yes.v[i] : no.v[i]; });
}
HR_INLINE F16 keep_first(F16 x, int n, F16 other) {
  return lanes<F16>([&](int i) { return i < n ? x.v[i] : other.v[i]; });
}

// The tree of simd_fold.h.
template <class F> HR_INLINE float fold_lanes(F16 x, F&& f) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) x.v[i] = f(x.v[i], x.v[i + width]);
  return x.v[0];
}
HR_INLINE float sum(F16 x) { return fold_lanes(x, [](float a, float b) { return a + b; }); }
HR_INLINE float highest(F16 x) { return fold_lanes(x, [](float a, float b) { return a > b ? a : b; }); }

}  // namespace hr

#endif
