// Sums of products of bytes, sixteen columns side by side: unsigned weights, signed activations, four k's a word.
//
// A storage's weight byte is its number plus ZERO (Q8_0: 128, Q4_0: 8, Q4_1: 0), so that the wanted sum is the sum of
// byte * activation less ZERO times the sum of activations, which comes with them. Sums of a group of 32 are exact
// integers on every machine: below 32 * 255 * 127.
#ifndef HEADRACE_MATMUL_INT8_DOT_H
#define HEADRACE_MATMUL_INT8_DOT_H

#include "../matmul/storage.h"

namespace hr {

constexpr int zero_point(int storage) { return storage == STORAGE_Q8_0 ? 128 : storage == STORAGE_Q4_0 ? 8 : 0; }

#if defined(__AVX512VNNI__)

HR_INLINE I16 nibbles_low(I16 w) { return {_mm512_and_si512(w.v, _mm512_set1_epi8(15))}; }
HR_INLINE I16 nibbles_high(I16 w) { return {_mm512_and_si512(_mm512_srli_epi32(w.v, 4), _mm512_set1_epi8(15))}; }

// BITS of the weights: 8 or 4. *correction: minus ZERO times the sum of the group's activations.
template <int BITS, int ZERO> struct Dot {
  __m512i v;
  static HR_INLINE Dot start(const int32_t* correction) {
    return {ZERO == 0 ? _mm512_setzero_si512() : _mm512_set1_epi32(*correction)};
  }
  HR_INLINE void add(I16 weights, int32_t activations) {
    v = _mm512_dpbusd_epi32(v, weights.v, _mm512_set1_epi32(activations));
  }
  HR_INLINE I16 finish(const int32_t*) const { return {v}; }
};

#elif defined(__AVX2__)

HR_INLINE I16 nibbles_low(I16 w) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(w.a, mask), _mm256_and_si256(w.b, mask)};
}
HR_INLINE I16 nibbles_high(I16 w) {
  return nibbles_low({_mm256_srli_epi32(w.a, 4), _mm256_srli_epi32(w.b, 4)});
}

template <int BITS, int ZERO> struct Dot;

// Pairs of products in 16 bits: a group adds 16 of at most 15 * 127 to each, which fits.
template <int ZERO> struct Dot<4, ZERO> {
  __m256i a, b;
  static HR_INLINE Dot start(const int32_t*) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  HR_INLINE void add(I16 weights, int32_t activations) {
    const __m256i x = _mm256_set1_epi32(activations);
    a = _mm256_add_epi16(a, _mm256_maddubs_epi16(weights.a, x));
    b = _mm256_add_epi16(b, _mm256_maddubs_epi16(weights.b, x));
  }
  HR_INLINE I16 finish(const int32_t* correction) const {
    const __m256i ones = _mm256_set1_epi16(1);
    return hr::add({_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones)}, set1_int(*correction));
  }
};

// A pair of products of full bytes overflows 16 bits. Magnitudes of the weights, below or at 128, times activations that
// took over the weights' signs do not.
template <int ZERO> struct Dot<8, ZERO> {
  __m256i a, b;
  static HR_INLINE Dot start(const int32_t*) { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
  static HR_INLINE __m256i products(__m256i weights, __m256i x) {
    const __m256i w = _mm256_xor_si256(weights, _mm256_set1_epi8(-128));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  HR_INLINE void add(I16 weights, int32_t activations) {
    const __m256i x = _mm256_set1_epi32(activations);
    a = _mm256_add_epi32(a, products(weights.a, x));
    b = _mm256_add_epi32(b, products(weights.b, x));
  }
  HR_INLINE I16 finish(const int32_t*) const { return {a, b}; }  // signed weights need no correction
};

#else

HR_INLINE I16 nibbles_low(I16 w) {
  return lanes<I16>([&](int i) { return w.v[i] & 0x0F0F0F0F; });
}
HR_INLINE I16 nibbles_high(I16 w) {
  return lanes<I16>([&](int i) { return (w.v[i] >> 4) & 0x0F0F0F0F; });
}

template <int BITS, int ZERO> struct Dot {
  I16 v;
  static HR_INLINE Dot start(const int32_t* correction) { return {set1_int(*correction)}; }
  HR_INLINE void add(I16 weights, int32_t activations) {
    for (int i = 0; i < LANES; i++)
      for (int b = 0; b < 4; b++)
        v.v[i] += ((weights.v[i] >> (8 * b)) & 255) * static_cast<int8_t>(activations >> (8 * b));
  }
  HR_INLINE I16 finish(const int32_t*) const { return v; }
};

#endif

}  // namespace hr

#endif
