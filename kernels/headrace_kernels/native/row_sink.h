// Where a kernel leaves rows for the product that follows: row after row, or in the strips the product reads.
#ifndef HEADRACE_ROW_SINK_H
#define HEADRACE_ROW_SINK_H

#include "../matmul/kernel.h"

namespace hr {

class RowSink {
 public:
  static RowSink row_major(float* base, int64_t stride) { return {base, stride, 0, Strips(1)}; }
  // base holds rows * width floats: strip s begins at begin(s) * width and is stored [width][size(s)].
  static RowSink strips(float* base, int width, int rows) {
    return rows == 1 ? row_major(base, width) : RowSink{base, 0, width, Strips(rows)};
  }

  // The first n lanes of v go to columns column … column + n - 1 of a row.
  HR_INLINE void put(int row, int column, F16 v, int n) const {
    if (stride_) {
      float* to = base_ + row * stride_ + column;
      if (n == LANES) store(to, v);
      else store_first(to, v, n);
      return;
    }
    const int strip = cut_.of(row), begin = cut_.begin(strip), size = cut_.size(strip);
    float* to = base_ + static_cast<size_t>(begin) * width_ + static_cast<size_t>(column) * size + (row - begin);
    float lanes[LANES];
    store(lanes, v);
    for (int i = 0; i < n; i++) to[i * size] = lanes[i];
  }

 private:
  RowSink(float* base, int64_t stride, int width, Strips cut) : base_(base), stride_(stride), width_(width), cut_(cut) {}

  float* base_;
  int64_t stride_;  // 0: in strips
  int width_;
  Strips cut_;
};

}  // namespace hr

#endif
