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

// |x| at most 65504, or NaN. To nearest, ties to even.
HR_INLINE uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t sign = bits >> 16 & 0x8000u;
  bits &= 0x7FFFFFFFu;
  if (bits > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (bits < 0x38800000u) {  // subnormal: the sum's last place is the result's
    float shifted;
    std::memcpy(&shifted, &bits, 4);
    shifted += 0.5f;
    std::memcpy(&bits, &shifted, 4);
    return static_cast<uint16_t>(sign | (bits - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xFFFu + (bits >> 13 & 1u)) >> 13));
}

HR_INLINE uint16_t float_to_bfloat(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return x == x ? static_cast<uint16_t>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16) : 0x7FC0u;
}
HR_INLINE void store_bfloat(uint16_t* p, F16 v) {
  float lanes[LANES];
  store(lanes, v);
  for (int i = 0; i < LANES; i++) p[i] = float_to_bfloat(lanes[i]);
}

}  // namespace hr

#endif
