#include "../native/export.h"
#include "../native/pool.h"
#include "norm.h"

using namespace hr;

// residual[rows][width] += x where both are given, then out = norm(residual), or norm(x) without a residual.
HR_EXPORT void hr_rms_norm(const float* x, float* residual, const float* weight, int32_t rows, int32_t width,
                           float epsilon, float* out) {
  const RowSink sink = RowSink::row_major(out, width);
  parallel_rows(rows, [&](int r) {
    const size_t at = static_cast<size_t>(r) * width;
    if (residual)
      for (int i = 0; i < width; i++) residual[at + i] += x[at + i];
    rms_norm_row((residual ? residual : x) + at, weight, width, epsilon, r, sink);
  });
}
