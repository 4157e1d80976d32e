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

  // One row; column c of it is at `to + c * step`.
  struct Row {
    float* to;
    int step;

    // The first n lanes of v go to columns column … column + n - 1.
    HR_INLINE void put(int column, F16 v, int n) const {
      float* at = to + static_cast<size_t>(column) * step;
      if (step == 1) {
        if (n == LANES) store(at, v);
        else store_first(at, v, n);
        return;
      }
      float lanes[LANES];
      store(lanes, v);
      for (int i = 0; i < n; i++) at[i * step] = lanes[i];
    }
  };

  // Finding a row's place takes divisions: once for all its columns.
  HR_INLINE Row row(int r) const {
    if (stride_) return {base_ + r * stride_, 1};
    const int strip = cut_.of(r), begin = cut_.begin(strip);
    return {base_ + static_cast<size_t>(begin) * width_ + (r - begin), cut_.size(strip)};
  }
  HR_INLINE void put(int r, int column, F16 v, int n) const { row(r).put(column, v, n); }

 private:
  RowSink(float* base, int64_t stride, int width, Strips cut) : base_(base), stride_(stride), width_(width), cut_(cut) {}

  float* base_;
  int64_t stride_;  // 0: in strips
  int width_;
  Strips cut_;
};

}  // namespace hr

#endif
