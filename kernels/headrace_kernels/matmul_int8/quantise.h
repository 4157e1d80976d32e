// Activations in bytes: a scale for each row and group of 32, so that a row's result depends on that row alone.
#ifndef HEADRACE_MATMUL_INT8_QUANTISE_H
#define HEADRACE_MATMUL_INT8_QUANTISE_H

#include "../matmul/kernel.h"

namespace hr {

// Of a strip of n rows, for each group of 32 k: words [8][n] of four k's, then scale[n], minus_sum[n] (of the bytes) and
// offset[n] = scale * sum.
struct QuantisedRows {
  const uint8_t* data;
  int k;
  Strips strips;

  static constexpr size_t GROUP_BYTES = QUANT_GROUP + 3 * 4;  // of one row
  static size_t bytes(int rows, int k) { return static_cast<size_t>(rows) * (k / QUANT_GROUP) * GROUP_BYTES; }
  const uint8_t* strip(int s, int group) const {
    return data + (static_cast<size_t>(strips.begin(s)) * (k / QUANT_GROUP) +
                   static_cast<size_t>(group) * strips.size(s)) * GROUP_BYTES;
  }
};

constexpr int INT8_STRIP = REGISTERS >= 32 ? 8 : 4;

// A group's 32 numbers of one row: q = round(x * 127 / max|x|), ties to even. NaN and infinity make the scale NaN, and
// with it the row.
HR_INLINE void quantise_group(F16 low, F16 high, uint8_t* group, int row, int rows) {
  const F16 magnitude = max(max(low, negate(low)), max(high, negate(high)));
  const float top = highest(magnitude), poison = sum(add(sub(low, low), sub(high, high)));
  const F16 inverse = set1(top > 0 && top < 3e38f ? 127.0f / top : 0.0f);
  const I16 a = to_int(mul(low, inverse)), b = to_int(mul(high, inverse));
  int8_t bytes[2 * LANES];
  store_bytes(bytes, a);
  store_bytes(bytes + LANES, b);
  int32_t group_words[8], lanes[LANES], total = 0;
  std::memcpy(group_words, bytes, sizeof bytes);
  store_words(lanes, add(a, b));
  for (int i = 0; i < LANES; i++) total += lanes[i] & 0xFFFF;  // masked: NaN makes wild lanes, and adding must not overflow
  total = static_cast<int16_t>(total);                         // the sum is below 2^15, so its low half is all of it
  int32_t* words = reinterpret_cast<int32_t*>(group);
  for (int c = 0; c < 8; c++) words[c * rows + row] = group_words[c];
  const float scale = top / 127.0f + poison;
  float* scales = reinterpret_cast<float*>(words + 8 * rows);
  scales[row] = scale;
  words[9 * rows + row] = -total;
  scales[2 * rows + row] = scale * static_cast<float>(total);
}

}  // namespace hr

#endif
