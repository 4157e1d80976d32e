// exp and its relatives, lane by lane: a fixed polynomial in fused multiply-adds, so that every machine agrees.
#ifndef HEADRACE_VECTOR_MATH_H
#define HEADRACE_VECTOR_MATH_H

#include <limits>

#include "simd.h"

namespace hr {

constexpr float LOWEST_EXP = -87.3365f;  // below, exp leaves the normal range: zero
constexpr float HIGHEST_EXP = 88.3762f;

// Cody and Waite's reduction by ln 2 in two parts, then Taylor to the seventh power on |r| <= ln 2 / 2: within one unit
// in the last place. exp(0) is 1, exp(-inf) is 0, exp(inf) is inf; NaN stays.
HR_INLINE F16 exp(F16 x) {
  F16 clamped = min(set1(HIGHEST_EXP), max(set1(LOWEST_EXP), x));  // in this order NaN passes
  I16 n = to_int(mul(clamped, set1(1.44269504088896341f)));
  F16 nf = to_float(n);
  F16 r = fma(nf, set1(-0.693359375f), clamped);
  r = fma(nf, set1(2.12194440e-4f), r);
  F16 p = set1(1.0f / 5040);
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  F16 y = mul(p, as_float(shift_left<23>(add(n, set1_int(127)))));
  y = where_less(set1(HIGHEST_EXP), x, set1(std::numeric_limits<float>::infinity()), y);
  return where_less(x, set1(LOWEST_EXP), zero(), y);
}

// 1 / (1 + exp(-x)), 0 and 1 far out.
HR_INLINE F16 sigmoid(F16 x) { return div(set1(1.0f), add(set1(1.0f), exp(negate(x)))); }

// 1 - 2 / (exp(2x) + 1) far from zero; near it, where that cancels, Cephes' odd polynomial.
HR_INLINE F16 tanh(F16 x) {
  F16 far = sub(set1(1.0f), div(set1(2.0f), add(exp(add(x, x)), set1(1.0f))));
  F16 z = mul(x, x);
  F16 p = fma(set1(-5.70498872745e-3f), z, set1(2.06390887954e-2f));
  p = fma(p, z, set1(-5.37397155531e-2f));
  p = fma(p, z, set1(1.33314422036e-1f));
  p = fma(p, z, set1(-3.33332819422e-1f));
  return where_less(z, set1(0.390625f), fma(mul(x, z), p, x), far);
}

HR_INLINE F16 silu(F16 x) { return mul(x, sigmoid(x)); }

// x/2 (1 + tanh u) with u = sqrt(2/pi) (x + 0.044715 x^3), which is x sigmoid(2u).
HR_INLINE F16 gelu_tanh(F16 x) {
  F16 cube = mul(mul(x, x), x);
  F16 u = mul(fma(cube, set1(0.044715f), x), set1(0.7978845608028654f * 2));
  return mul(x, sigmoid(u));
}

// x/2 (1 + erf(x / sqrt 2)); erf after Abramowitz and Stegun 7.1.26 (error below 1.5e-7).
HR_INLINE F16 gelu_erf(F16 x) {
  F16 z = mul(x, set1(0.70710678118654752f));
  F16 a = max(z, negate(z));
  F16 t = div(set1(1.0f), fma(a, set1(0.3275911f), set1(1.0f)));
  F16 p = set1(1.061405429f);
  p = fma(p, t, set1(-1.453152027f));
  p = fma(p, t, set1(1.421413741f));
  p = fma(p, t, set1(-0.284496736f));
  p = fma(p, t, set1(0.254829592f));
  F16 tail = mul(mul(p, t), exp(negate(mul(a, a))));  // 1 - erf(a)
  F16 half = mul(x, set1(0.5f));
  F16 below = mul(half, tail), above = mul(half, sub(set1(2.0f), tail));
  return where_less(x, zero(), below, above);
}

HR_INLINE F16 soft_cap(F16 x, float cap) { return mul(tanh(div(x, set1(cap))), set1(cap)); }

}  // namespace hr

#endif
