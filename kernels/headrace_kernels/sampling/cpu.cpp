// What a sampler asks of rows of logits, each row by itself and in one pass.
#include <algorithm>
#include <cmath>
#include <limits>

#include "../native/export.h"
#include "../native/pool.h"
#include "../native/vector_math.h"

namespace hr {
namespace {

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();

// The largest of a row; NaN if any element is.
float row_maximum(const float* x, int width) {
  F16 top = set1(MINUS_INFINITY), poison = zero();
  int i = 0;
  for (; i + LANES <= width; i += LANES) {
    F16 v = load(x + i);
    top = max(v, top);
    poison = fma(v, zero(), poison);  // NaN and infinities become NaN and stay
  }
  if (i < width) {
    F16 v = load_first(x + i, width - i);
    poison = fma(v, zero(), poison);
    top = max(keep_first(v, width - i, set1(MINUS_INFINITY)), top);
  }
  return std::isnan(sum(poison)) ? std::numeric_limits<float>::quiet_NaN() : highest(top);
}

constexpr int BLOCK = 1024;  // searched element by element once it is known to hold the largest

struct Best {
  int64_t id;
  float value;
};

// The first of the largest of a row; -1 and NaN if any element is not finite.
Best row_best(const float* x, int width) {
  int at = 0;
  float top = MINUS_INFINITY;
  for (int begin = 0; begin < width; begin += BLOCK) {
    const float found = row_maximum(x + begin, std::min(BLOCK, width - begin));
    if (std::isnan(found)) return {-1, found};
    if (found > top) top = found, at = begin;
  }
  while (x[at] != top) at++;
  return {at, top};
}

float exp_sum(const float* x, int width, float offset) {
  F16 total = zero(), shift = set1(offset);
  int i = 0;
  for (; i + LANES <= width; i += LANES) total = add(total, exp(sub(load(x + i), shift)));
  if (i < width) {
    F16 v = keep_first(load_first(x + i, width - i), width - i, set1(MINUS_INFINITY));
    total = add(total, exp(sub(v, shift)));
  }
  return sum(total);
}

}  // namespace
}  // namespace hr

using namespace hr;

// ids[r]: the first of the largest logits of row r, -1 if one is not finite. maxima[r]: its value, NaN likewise.
HR_EXPORT void hr_argmax(const float* logits, int64_t stride, int32_t rows, int32_t width, int64_t* ids, float* maxima) {
  parallel(rows, [&](int r) {
    const Best best = row_best(logits + r * stride, width);
    ids[r] = best.id;
    maxima[r] = best.value;
  });
}

// out[r] = log of the sum of exp(logits[r]): a log-probability is a logit less this.
HR_EXPORT void hr_log_sum_exp(const float* logits, int64_t stride, int32_t rows, int32_t width, float* out) {
  parallel(rows, [&](int r) {
    const float* x = logits + r * stride;
    const float top = row_maximum(x, width);
    out[r] = top + std::log(exp_sum(x, width, top));
  });
}
