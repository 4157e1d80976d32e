// Sixteen float lanes, the same on every machine: one AVX-512 register, two AVX2 registers, or an array.
//
// Kernels are written once against F16. Each lane is computed by the same sequence of IEEE operations whatever the
// instruction set, and sums across lanes have one fixed tree, so results are equal bit for bit everywhere.
// Compile with -ffp-contract=off: the only fused operations are the ones spelled fma().
#ifndef HEADRACE_SIMD_H
#define HEADRACE_SIMD_H

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#define HR_INLINE inline __attribute__((always_inline))
#define HR_LAMBDA __attribute__((always_inline))

namespace hr {

constexpr int LANES = 16;

// Calls f(0), f(1), … f(N-1) with compile-time indices, so that arrays they index stay in registers.
template <class F, int... I>
HR_INLINE void repeat_each(F&& f, std::integer_sequence<int, I...>) {
  (f(std::integral_constant<int, I>{}), ...);
}
template <int N, class F>
HR_INLINE void repeat(F&& f) {
  repeat_each(static_cast<F&&>(f), std::make_integer_sequence<int, N>{});
}

}  // namespace hr

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd_avx2.h"
#else
#include "simd_generic.h"
#endif

namespace hr {

HR_INLINE F16 negate(F16 x) { return sub(set1(-0.0f), x); }

// The first n lanes (the rest are zero), and the way back.
HR_INLINE F16 load_first(const float* p, int n) {
  float lanes[LANES] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(float));
  return load(lanes);
}
HR_INLINE void store_first(float* p, F16 v, int n) {
  float lanes[LANES];
  store(lanes, v);
  std::memcpy(p, lanes, static_cast<size_t>(n) * sizeof(float));
}

HR_INLINE float half_to_float(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, mantissa = h & 0x3FFu;
  uint32_t bits;
  if (exponent == 31) {
    bits = sign | 0x7F800000u | (mantissa << 13);
  } else if (exponent != 0) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {  // zero or subnormal: exact as a product
    float value = static_cast<float>(mantissa) * 5.9604644775390625e-8f;
    std::memcpy(&bits, &value, 4);
    bits |= sign;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

HR_INLINE float bfloat_to_float(uint16_t b) {
  uint32_t bits = static_cast<uint32_t>(b) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

}  // namespace hr

#endif
