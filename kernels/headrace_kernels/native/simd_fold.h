// Sums and maxima across the lanes of an F16: halves are folded 16 → 8 → 4 → 2 → 1, the same tree on every machine.
#ifndef HEADRACE_SIMD_FOLD_H
#define HEADRACE_SIMD_FOLD_H

namespace hr {

HR_INLINE float sum(F16 x) {
  __m256 high, low = fold(x, high);
  __m256 eight = _mm256_add_ps(low, high);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
HR_INLINE float highest(F16 x) {
  __m256 high, low = fold(x, high);
  __m256 eight = _mm256_max_ps(low, high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}


// The same of integers, modulo 2^32.
HR_INLINE int32_t sum(I16 x) {
  __m256i high, low = fold(x, high);
  __m256i eight = _mm256_add_epi32(low, high);
  __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}
HR_INLINE int32_t highest(I16 x) {
  __m256i high, low = fold(x, high);
  __m256i eight = _mm256_max_epi32(low, high);
  __m128i four = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  __m128i two = _mm_max_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_max_epi32(two, _mm_shuffle_epi32(two, 1)));
}

}  // namespace hr

#endif
