// Products in fp32 arithmetic: activations into strips, sums into results.
#include "../native/export.h"
#include "../matmul_int8/product.h"
#include "product.h"

namespace hr {

void pack_strip(const float* x, int64_t ldx, int k, int rows, float* out) {
  for (int i = 0; i < k; i++)
    for (int r = 0; r < rows; r++) out[static_cast<size_t>(i) * rows + r] = x[r * ldx + i];
}

PackedRows pack_rows(const float* x, int64_t ldx, int rows, int k) {
  Strips strips(rows);
  if (rows <= 1) return {x, k, strips};
  float* packed = scratch<float>(SLOT_PACKED_ROWS, static_cast<size_t>(rows) * k);
  auto pack = [&](int s) {
    const int begin = strips.begin(s);
    pack_strip(x + begin * ldx, ldx, k, strips.size(s), packed + static_cast<size_t>(begin) * k);
  };
  parallel(strips.count, pack);
  return {packed, k, strips};
}

void finish_rows(const RowMajorOutput& out, const Weight& w, const float* sums, int panel, int row, int rows) {
  const int column = panel * PANEL, width = std::min(PANEL, w.n - column);
  for (int r = 0; r < rows; r++, sums += PANEL) {
    float* y = out.y + (row + r) * out.ldy + column;
    const float* residual = out.residual ? out.residual + (row + r) * out.ld_residual + column : nullptr;
    for (int i = 0; i < width; i += LANES) {
      const int n = std::min(LANES, width - i);
      F16 value = load(sums + i);
      if (w.bias) value = add(value, n == LANES ? load(w.bias + column + i) : load_first(w.bias + column + i, n));
      if (residual) value = add(value, n == LANES ? load(residual + i) : load_first(residual + i, n));
      if (n == LANES) store(y + i, value);
      else store_first(y + i, value, n);
    }
  }
}

}  // namespace hr

using namespace hr;

HR_EXPORT void hr_linear(const Weight* w, const float* x, int64_t ldx, int32_t rows, float* y, int64_t ldy,
                         const float* residual, int64_t ld_residual) {
  const RowMajorOutput out{y, ldy, residual, ld_residual};
  if (w->int8_activations) linear(quantise_rows(x, ldx, rows, *w), *w, out);
  else linear(pack_rows(x, ldx, rows, w->k), *w, out);
}
