// y = x W^T with activations in bytes, over all threads.
#ifndef HEADRACE_MATMUL_INT8_PRODUCT_H
#define HEADRACE_MATMUL_INT8_PRODUCT_H

#include "../matmul/product.h"
#include "quantise.h"

namespace hr {

// Uses the caller's scratch: valid until its next call. k is a multiple of 32.
QuantisedRows quantise_rows(const float* x, int64_t ldx, int rows, const Weight& w);

void multiply_tile_int8(const QuantisedRows& rows, const Weight& w, int panel, int first_strip, int last_strip, float* sums);

template <class Finish>
void product(const QuantisedRows& rows, const Weight& w, int group, Finish&& finish) {
  auto multiply = [&](int panel, int first, int last, float* sums) { multiply_tile_int8(rows, w, panel, first, last, sums); };
  product_tiles(rows.strips, ROWS_PER_TILE / int8_strip(rows.strips.rows), w, group, multiply, finish);
}

inline void linear(const QuantisedRows& rows, const Weight& w, const RowMajorOutput& out) {
  product(rows, w, 1, [&](const float* sums, int panel, int row, int count) { finish_rows(out, w, sums, panel, row, count); });
}

}  // namespace hr

#endif
