#include "../native/export.h"
#include "kernel.h"
#include "product.h"

namespace hr {
namespace {

// So many groups of a panel, 15 KiB of Q4_1 or 26 of Q8_0, stay in the first-level cache while all strips use them.
constexpr int GROUPS_PER_BLOCK = 24;
// As FETCH_DISTANCE, for weights that are used up twice as fast.
constexpr size_t INT8_FETCH_DISTANCE = 6144;

template <class B, int... I>
MultiplyInt8 choose(int rows, std::integer_sequence<int, I...>) {
  static constexpr MultiplyInt8 table[] = {multiply_int8<B, I + 1>...};
  return table[rows - 1];
}

MultiplyInt8 multiply_int8_for(int storage, int rows) {
  const auto heights = std::make_integer_sequence<int, INT8_MAX_STRIP>{};
  switch (storage) {
    case STORAGE_Q4_0: return choose<Bytes4<false>>(rows, heights);
    case STORAGE_Q4_1: return choose<Bytes4<true>>(rows, heights);
    default: return choose<Bytes8>(rows, heights);
  }
}

}  // namespace

// Eight rows keep all sums in registers where a second load can feed each product; Zen, which makes sums of bytes and
// scales on the same two pipes and stores a register in two cycles, is a twentieth faster without the spills of eight.
// Where eight are all there are, it waits for memory, and one strip reads that once.
int int8_strip(int rows) {
#if defined(__AVX512VNNI__)
  static const int many = __builtin_cpu_is("amd") ? 6 : INT8_MAX_STRIP;
  return rows <= INT8_MAX_STRIP ? INT8_MAX_STRIP : many;
#else
  (void)rows;
  return INT8_MAX_STRIP;
#endif
}

QuantisedRows quantise_rows(const float* x, int64_t ldx, int rows, const Weight& w) {
  uint8_t* data = scratch<uint8_t>(SLOT_QUANTISED_ROWS, QuantisedRows::bytes(rows, w.k));
  const QuantisedRows out = QuantisedRows::at(data, w.k, rows);
  const int zero = zero_point(w.storage);
  parallel_rows(rows, [&](int r) { quantise_row(x + r * ldx, zero, out, data, r); });
  return out;
}

void multiply_tile_int8(const QuantisedRows& rows, const Weight& w, int panel, int first_strip, int last_strip, float* sums) {
  const size_t group_bytes = panel_bytes(w.storage, QUANT_GROUP);
  const int groups = w.k / QUANT_GROUP, step = last_strip - first_strip > 1 ? GROUPS_PER_BLOCK : groups;
  const uint8_t* data = w.panels + static_cast<size_t>(panel) * groups * group_bytes;
  const int row0 = rows.strips.begin(first_strip);
  for (int g = 0; g < groups; g += step) {
    const uint8_t* block = data + g * group_bytes;
    for (int s = first_strip; s < last_strip; s++) {
      const int size = rows.strips.size(s);
      // One pass over the block fetches the next one: the second, since the first waits for memory as it is. A single
      // strip does while it multiplies; one row has too little to do meanwhile.
      const bool fetches = last_strip - first_strip == 1 ? size > 1 : s == first_strip + 1;
      const size_t distance = last_strip - first_strip == 1 ? INT8_FETCH_DISTANCE : step * group_bytes;
      multiply_int8_for(w.storage, size)(rows.strip(s, g), block, std::min(step, groups - g),
                                         sums + (rows.strips.begin(s) - row0) * PANEL, g > 0,
                                         fetches ? block + distance : nullptr);
    }
  }
}

}  // namespace hr
