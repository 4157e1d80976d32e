// Where a kernel leaves rows for the product that follows: row after row, or in the strips the product reads, of floats or
// of bytes.
#ifndef HEADRACE_ROW_SINK_H
#define HEADRACE_ROW_SINK_H

#include "../matmul_int8/dot.h"
#include "../matmul_int8/quantise.h"

namespace hr {

class RowSink {
 public:
  static RowSink row_major(float* base, int64_t stride) { return {base, stride, 0, Strips(1)}; }
  // base holds rows * width floats: strip s begins at begin(s) * width and is stored [width][size(s)].
  static RowSink strips(float* base, int width, int rows) {
    return rows == 1 ? row_major(base, width) : RowSink{base, 0, width, Strips(rows)};
  }
  // base holds QuantisedRows::bytes(rows, width), for a product with weights of `storage`. Whoever puts a group of 32
  // columns makes its bytes: both halves, one after the other, by one Row.
  static RowSink bytes(void* base, int width, int rows, int storage) {
    RowSink sink{static_cast<float*>(base), 0, width, Strips(rows, int8_strip(rows))};
    sink.in_bytes_ = true;
    sink.zero_point_ = zero_point(storage);
    return sink;
  }

  // One row; column c of it is at `to + c * step`, or in the bytes of `groups`.
  struct Row {
    float* to;
    int step;
    uint8_t* groups = nullptr;  // of the row's strip, which has `step` rows
    int row = 0, zero_point = 0;
    F16 low_half = zero();

    // The first n lanes of v go to columns column … column + n - 1; into bytes, all of them.
    HR_INLINE void put(int column, F16 v, int n) {
      if (groups) return put_bytes(column, v);
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

   private:
    HR_INLINE void put_bytes(int column, F16 v) {
      if (column % QUANT_GROUP == 0) {
        low_half = v;
        return;
      }
      uint8_t* group = groups + static_cast<size_t>(column / QUANT_GROUP) * step * QuantisedRows::GROUP_BYTES;
      quantise_group(low_half, v, zero_point, group, row, step);
    }
  };

  // Finding a row's place takes divisions: once for all its columns.
  HR_INLINE Row row(int r) const {
    if (stride_) return {base_ + r * stride_, 1};
    const int strip = cut_.of(r), begin = cut_.begin(strip);
    if (in_bytes_)
      return {nullptr, cut_.size(strip), reinterpret_cast<uint8_t*>(base_) + QuantisedRows::bytes(begin, width_), r - begin, zero_point_};
    return {base_ + static_cast<size_t>(begin) * width_ + (r - begin), cut_.size(strip)};
  }

 private:
  RowSink(float* base, int64_t stride, int width, Strips cut) : base_(base), stride_(stride), width_(width), cut_(cut) {}

  float* base_;
  int64_t stride_;  // 0: in strips
  int width_;
  Strips cut_;
  bool in_bytes_ = false;
  int zero_point_ = 0;
};

}  // namespace hr

#endif
