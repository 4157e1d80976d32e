// Activations in bytes: a scale for each row and group of 32, so that a row's result depends on that row alone.
#ifndef HEADRACE_MATMUL_INT8_QUANTISE_H
#define HEADRACE_MATMUL_INT8_QUANTISE_H

#include <limits>

#include "../matmul/kernel.h"

namespace hr {

constexpr int INT8_MAX_STRIP = REGISTERS >= 32 ? 8 : 4;
// The longest strip that `rows` rows are cut into on this processor; the bits do not depend on it.
int int8_strip(int rows);

// Of a strip of n rows, for each group of 32 k: words [8][n] of four k's, then scale[n], correction[n] = minus the weights'
// zero point times the sum of the bytes, and offset[n] = scale * sum.
struct QuantisedRows {
  const uint8_t* data;
  int k;
  Strips strips;

  static constexpr size_t GROUP_BYTES = QUANT_GROUP + 3 * 4;  // of one row
  static size_t bytes(int rows, int k) { return static_cast<size_t>(rows) * (k / QUANT_GROUP) * GROUP_BYTES; }
  static QuantisedRows at(const void* data, int k, int rows) {
    return {static_cast<const uint8_t*>(data), k, Strips(rows, int8_strip(rows))};
  }
  const uint8_t* strip(int s, int group) const {
    return data + (static_cast<size_t>(strips.begin(s)) * (k / QUANT_GROUP) +
                   static_cast<size_t>(group) * strips.size(s)) * GROUP_BYTES;
  }
};

// A group's 32 numbers of one row: q = round(x * 127 / max|x|), ties to even. NaN and infinity make the scale NaN, and
// with it the row: as integers their magnitudes are the largest.
HR_INLINE void quantise_group(F16 low, F16 high, int zero_point, uint8_t* group, int row, int rows) {
  const int32_t top_bits = highest(max(magnitude_bits(low), magnitude_bits(high)));
  float top;
  std::memcpy(&top, &top_bits, sizeof top);
  const bool finite = top_bits < 0x7F800000;
  const F16 inverse = set1(finite && top > 0 ? 127.0f / top : 0.0f);
  const I16 a = to_int(mul(low, inverse)), b = to_int(mul(high, inverse));
  int8_t bytes[2 * LANES];
  store_bytes(bytes, a);
  store_bytes(bytes + LANES, b);
  int32_t group_words[8];
  std::memcpy(group_words, bytes, sizeof bytes);
  int32_t* words = reinterpret_cast<int32_t*>(group);
  for (int c = 0; c < 8; c++) words[c * rows + row] = group_words[c];
  const int32_t total = finite ? sum(add(a, b)) : 0;
  const float scale = finite ? top / 127.0f : std::numeric_limits<float>::quiet_NaN();
  float* scales = reinterpret_cast<float*>(words + 8 * rows);
  scales[row] = scale;
  words[9 * rows + row] = -zero_point * total;
  scales[2 * rows + row] = scale * static_cast<float>(total);
}

// One row, for weights with this zero point.
HR_INLINE void quantise_row(const float* x, int zero_point, const QuantisedRows& rows, uint8_t* data, int r) {
  const int s = rows.strips.of(r), size = rows.strips.size(s), row = r - rows.strips.begin(s);
  uint8_t* group = data + (rows.strip(s, 0) - rows.data);
  for (int k = 0; k < rows.k; k += QUANT_GROUP, group += size * QuantisedRows::GROUP_BYTES)
    quantise_group(load(x + k), load(x + k + LANES), zero_point, group, row, size);
}

}  // namespace hr

#endif
