// From rows of a matrix, as checkpoints and GGUF files have them, to panels.
#include "../native/export.h"
#include "product.h"

namespace hr {
namespace {

// GGUF blocks of 32 weights: Q8_0 {d, int8[32]}, Q4_0 {d, byte[16]}, Q4_1 {d, m, byte[16]}; d and m in fp16; the low
// nibble of byte i is weight i, the high one weight i + 16.
constexpr size_t Q8_0_BLOCK = 34, Q4_0_BLOCK = 18, Q4_1_BLOCK = 20;

template <class T>
void pack_dense(const uint8_t* row, int k, int column, uint8_t* panel) {
  T* out = reinterpret_cast<T*>(panel) + column;
  for (int i = 0; i < k; i++) {
    T value = 0;
    if (row) std::memcpy(&value, row + static_cast<size_t>(i) * sizeof(T), sizeof(T));
    out[static_cast<size_t>(i) * PANEL] = value;
  }
}

void put_half(uint8_t* header, int column, const uint8_t* value) {
  if (value) std::memcpy(header + column * 2, value, 2);
  else std::memset(header + column * 2, 0, 2);
}

void pack_q8_0(const uint8_t* row, int k, int column, uint8_t* panel) {
  for (int g = 0; g < k / QUANT_GROUP; g++, panel += Q8_0::GROUP_BYTES) {
    const uint8_t* block = row ? row + g * Q8_0_BLOCK : nullptr;
    put_half(panel, column, block);
    uint8_t* words = panel + Q8_0::HEADER;
    for (int i = 0; i < QUANT_GROUP; i++)
      words[((i / 4) * PANEL + column) * 4 + i % 4] = static_cast<uint8_t>((block ? block[2 + i] : 0) ^ 0x80);
  }
}

template <bool MINIMUM>
void pack_q4(const uint8_t* row, int k, int column, uint8_t* panel) {
  constexpr size_t HEADER = MINIMUM ? 4 : 2, BLOCK = MINIMUM ? Q4_1_BLOCK : Q4_0_BLOCK;
  for (int g = 0; g < k / QUANT_GROUP; g++, panel += Q4<MINIMUM>::GROUP_BYTES) {
    const uint8_t* block = row ? row + g * BLOCK : nullptr;
    put_half(panel, column, block);
    if (MINIMUM) put_half(panel + PANEL * 2, column, block ? block + 2 : nullptr);
    auto nibble_at = [&](int i) -> int {
      if (!block) return 0;
      uint8_t byte = block[HEADER + i % 16];
      return i < 16 ? byte & 15 : byte >> 4;
    };
    uint8_t* words = panel + Q4<MINIMUM>::HEADER;
    for (int chunk = 0; chunk < 4; chunk++)
      for (int b = 0; b < 4; b++)
        words[(chunk * PANEL + column) * 4 + b] =
            static_cast<uint8_t>(nibble_at(chunk * 8 + b) | nibble_at(chunk * 8 + 4 + b) << 4);
  }
}

void pack_column(int storage, const uint8_t* row, int k, int column, uint8_t* panel) {
  switch (storage) {
    case STORAGE_Q8_0: return pack_q8_0(row, k, column, panel);
    case STORAGE_Q4_0: return pack_q4<false>(row, k, column, panel);
    case STORAGE_Q4_1: return pack_q4<true>(row, k, column, panel);
    case STORAGE_F32: return pack_dense<uint32_t>(row, k, column, panel);
    default: return pack_dense<uint16_t>(row, k, column, panel);
  }
}

}  // namespace
}  // namespace hr

using namespace hr;

HR_EXPORT int64_t hr_packed_bytes(int32_t storage, int32_t n, int32_t k) {
  return static_cast<int64_t>(panel_count(n)) * static_cast<int64_t>(panel_bytes(storage, k));
}

// Column c of the result is row rows[c] of the source; -1, and what pads the last panel, is a row of zeros.
HR_EXPORT void hr_pack(int32_t storage, int32_t n, int32_t k, const uint8_t* source, int64_t row_bytes,
                       const int64_t* rows, uint8_t* out) {
  const size_t bytes = panel_bytes(storage, k);
  parallel(panel_count(n), [&](int p) {
    for (int column = 0; column < PANEL; column++) {
      const int c = p * PANEL + column;
      const int64_t row = c < n ? rows[c] : -1;
      pack_column(storage, row < 0 ? nullptr : source + row * row_bytes, k, column, out + p * bytes);
    }
  });
}
