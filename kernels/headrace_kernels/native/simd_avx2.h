// F16 as two 256-bit registers. Included by simd.h.
#ifndef HEADRACE_SIMD_AVX2_H
#define HEADRACE_SIMD_AVX2_H

#include <immintrin.h>

namespace hr {

constexpr const char* ISA = "avx2";
constexpr int REGISTERS = 8;  // pairs that hold an F16

struct F16 { __m256 a, b; };
struct I16 { __m256i a, b; };

HR_INLINE F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
HR_INLINE F16 set1(float x) { __m256 v = _mm256_set1_ps(x); return {v, v}; }
HR_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
HR_INLINE void store(float* p, F16 x) { _mm256_storeu_ps(p, x.a); _mm256_storeu_ps(p + 8, x.b); }
HR_INLINE F16 fma(F16 x, F16 y, F16 z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
HR_INLINE F16 add(F16 x, F16 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
HR_INLINE F16 sub(F16 x, F16 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
HR_INLINE F16 mul(F16 x, F16 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
HR_INLINE F16 div(F16 x, F16 y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
HR_INLINE F16 max(F16 x, F16 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
HR_INLINE F16 min(F16 x, F16 y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
HR_INLINE F16 load_half(const uint16_t* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
HR_INLINE __m256 widen_bfloat(const uint16_t* p) {
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}
HR_INLINE F16 load_bfloat(const uint16_t* p) { return {widen_bfloat(p), widen_bfloat(p + 8)}; }
// To nearest, ties to even.
HR_INLINE void store_half(uint16_t* p, F16 x) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
HR_INLINE F16 load_bytes(const int8_t* p) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes)),
          _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)))};
}

HR_INLINE I16 load_words(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
HR_INLINE void store_words(void* p, I16 x) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
HR_INLINE void store_bytes(void* p, I16 x) {
  __m256i pairs = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm_packs_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
}
HR_INLINE F16 to_float(I16 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
HR_INLINE I16 to_int(F16 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
HR_INLINE I16 add(I16 x, I16 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
HR_INLINE I16 set1_int(int32_t x) { __m256i v = _mm256_set1_epi32(x); return {v, v}; }
template <int N> HR_INLINE I16 shift_left(I16 x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
HR_INLINE F16 as_float(I16 x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
HR_INLINE I16 magnitude_bits(F16 x) {
  const __m256i mask = _mm256_set1_epi32(0x7FFFFFFF);
  return {_mm256_and_si256(_mm256_castps_si256(x.a), mask), _mm256_and_si256(_mm256_castps_si256(x.b), mask)};
}
HR_INLINE I16 max(I16 x, I16 y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }

template <int SHIFT, int BITS> HR_INLINE __m256 field(__m256i v) {
  if (SHIFT) v = _mm256_srli_epi32(v, SHIFT);
  if (SHIFT + BITS < 32) v = _mm256_and_si256(v, _mm256_set1_epi32((1 << BITS) - 1));
  return _mm256_cvtepi32_ps(v);
}
template <int SHIFT> HR_INLINE F16 nibble(I16 x) { return {field<SHIFT, 4>(x.a), field<SHIFT, 4>(x.b)}; }
template <int I> HR_INLINE F16 byte(I16 x) { return {field<8 * I, 8>(x.a), field<8 * I, 8>(x.b)}; }

HR_INLINE F16 where_less(F16 x, F16 y, F16 yes, F16 no) {
  return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
          _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
HR_INLINE F16 keep_first(F16 x, int n, F16 other) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256 low = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane));
  __m256 high = _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8), lane));
  return {_mm256_blendv_ps(other.a, x.a, low), _mm256_blendv_ps(other.b, x.b, high)};
}

HR_INLINE __m256 fold(F16 x, __m256& high) { high = x.b; return x.a; }
HR_INLINE __m256i fold(I16 x, __m256i& high) { high = x.b; return x.a; }

}  // namespace hr

#include "simd_fold.h"

#endif
