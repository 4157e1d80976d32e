// F16 as one 512-bit register. Included by simd.h.
#ifndef HEADRACE_SIMD_AVX512_H
#define HEADRACE_SIMD_AVX512_H

#include <immintrin.h>

namespace hr {

constexpr const char* ISA = "avx512";
constexpr int REGISTERS = 32;  // that hold an F16

struct F16 { __m512 v; };
struct I16 { __m512i v; };

HR_INLINE F16 zero() { return {_mm512_setzero_ps()}; }
HR_INLINE F16 set1(float x) { return {_mm512_set1_ps(x)}; }
HR_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
HR_INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
HR_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
HR_INLINE F16 add(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
HR_INLINE F16 sub(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
HR_INLINE F16 mul(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
HR_INLINE F16 div(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
HR_INLINE F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
HR_INLINE F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
HR_INLINE F16 load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
HR_INLINE F16 load_bfloat(const uint16_t* p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

// To nearest, ties to even.
HR_INLINE void store_half(uint16_t* p, F16 a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT));
}
HR_INLINE F16 load_bytes(const int8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))))};
}

HR_INLINE I16 load_words(const void* p) { return {_mm512_loadu_si512(p)}; }
HR_INLINE void store_words(void* p, I16 a) { _mm512_storeu_si512(p, a.v); }
// Lanes that fit a signed byte, as sixteen bytes.
HR_INLINE void store_bytes(void* p, I16 a) {
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
HR_INLINE F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }
HR_INLINE I16 to_int(F16 a) { return {_mm512_cvtps_epi32(a.v)}; }  // to nearest, ties to even
HR_INLINE I16 add(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
HR_INLINE I16 set1_int(int32_t x) { return {_mm512_set1_epi32(x)}; }
template <int N> HR_INLINE I16 shift_left(I16 a) { return {_mm512_slli_epi32(a.v, N)}; }
HR_INLINE F16 as_float(I16 a) { return {_mm512_castsi512_ps(a.v)}; }
HR_INLINE I16 magnitude_bits(F16 a) { return {_mm512_and_si512(_mm512_castps_si512(a.v), _mm512_set1_epi32(0x7FFFFFFF))}; }
HR_INLINE I16 max(I16 a, I16 b) { return {_mm512_max_epi32(a.v, b.v)}; }

// The unsigned number in bits SHIFT..SHIFT+3, as a float. vpermps looks at the low four bits of each index only.
template <int SHIFT> HR_INLINE F16 nibble(I16 a) {
  const __m512 table = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  return {_mm512_permutexvar_ps(SHIFT ? _mm512_srli_epi32(a.v, SHIFT) : a.v, table)};
}
// Byte I of each lane, unsigned, as a float.
template <int I> HR_INLINE F16 byte(I16 a) {
  const char Z = -128;
  const __m128i control = _mm_setr_epi8(I, Z, Z, Z, I + 4, Z, Z, Z, I + 8, Z, Z, Z, I + 12, Z, Z, Z);
  return {_mm512_cvtepi32_ps(_mm512_shuffle_epi8(a.v, _mm512_broadcast_i32x4(control)))};
}

HR_INLINE F16 where_less(F16 a, F16 b, F16 yes, F16 no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
// Lanes from n on replaced.
HR_INLINE F16 keep_first(F16 a, int n, F16 other) {
  __mmask16 mask = n >= 16 ? 0xFFFF : n <= 0 ? 0 : static_cast<__mmask16>((1u << n) - 1);
  return {_mm512_mask_blend_ps(mask, other.v, a.v)};
}

HR_INLINE __m256 fold(F16 a, __m256& high) {
  high = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
  return _mm512_castps512_ps256(a.v);
}
HR_INLINE __m256i fold(I16 a, __m256i& high) {
  high = _mm512_extracti64x4_epi64(a.v, 1);
  return _mm512_castsi512_si256(a.v);
}

}  // namespace hr

#include "simd_fold.h"

#endif
