// y = w x / sqrt(mean(x^2) + eps), a row at a time. The sum of squares has sixteen chains and one tree across them.
#ifndef HEADRACE_RMS_NORM_H
#define HEADRACE_RMS_NORM_H

#include "../native/row_sink.h"

namespace hr {

HR_INLINE F16 load_up_to(const float* p, int n) { return n >= LANES ? load(p) : load_first(p, n); }

HR_INLINE float inverse_rms(const float* x, int width, float epsilon) {
  F16 squares = zero();
  for (int i = 0; i < width; i += LANES) {
    F16 v = load_up_to(x + i, width - i);
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(width) + epsilon);
}

// f(column, normalised lanes, lanes in use) for a row; `weight` null: ones.
template <class F>
HR_INLINE void normalise(const float* x, const float* weight, int width, float epsilon, F&& f) {
  const F16 inverse = set1(inverse_rms(x, width, epsilon));
  for (int i = 0; i < width; i += LANES) {
    const int n = width - i < LANES ? width - i : LANES;
    F16 y = mul(load_up_to(x + i, n), inverse);
    if (weight) y = mul(y, load_up_to(weight + i, n));
    f(i, y, n);
  }
}

inline void rms_norm_row(const float* x, const float* weight, int width, float epsilon, int row, const RowSink& out) {
  RowSink::Row to = out.row(row);
  normalise(x, weight, width, epsilon, [&](int i, F16 y, int n) HR_LAMBDA { to.put(i, y, n); });
}

// x += norm(y): a norm after a block, before its residual (Gemma).
inline void add_norm_row(float* x, const float* y, const float* weight, int width, float epsilon) {
  normalise(y, weight, width, epsilon, [&](int i, F16 v, int n) HR_LAMBDA {
    F16 total = add(load_up_to(x + i, n), v);
    if (n == LANES) store(x + i, total);
    else store_first(x + i, total, n);
  });
}

}  // namespace hr

#endif
