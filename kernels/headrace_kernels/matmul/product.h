// y = x W^T over all threads: which tile computes what, and in which order it walks through memory.
#ifndef HEADRACE_MATMUL_PRODUCT_H
#define HEADRACE_MATMUL_PRODUCT_H

#include <algorithm>

#include "../native/pool.h"
#include "../native/scratch_slots.h"
#include "kernel.h"

namespace hr {

struct Weight {  // mirrored in native/structs.py
  int32_t storage;
  int32_t n, k;
  int32_t int8_activations;  // 0: arithmetic in fp32; 1: activations in bytes (matmul_int8)
  const uint8_t* panels;
  const float* bias;  // [n] or null
};

// Activations cut in strips: strip s is x + begin(s) * k, stored [k][size(s)].
struct PackedRows {
  const float* x;
  int k;
  Strips strips;
};

void unpack_panel(int storage, const uint8_t* panel, int k_count, float* out);
void pack_strip(const float* x, int64_t ldx, int k, int rows, float* out);
// Uses the caller's scratch: valid until its next call.
PackedRows pack_rows(const float* x, int64_t ldx, int rows, int k);

// out[count][k] in fp32: rows of W, as an embedding table is read.
void gather_rows(const Weight& w, const int64_t* ids, int count, float* out);

// A block of a panel in fp32 (24 KiB) and of a strip fit the first-level cache together; the block serves all strips.
constexpr int K_BLOCK = 192;
constexpr int ROWS_PER_TILE = 8 * MAX_STRIP;
// Below this a tile costs less than handing it out.
constexpr int64_t TILE_OPERATIONS = 200'000;

// How far ahead of its reads a single strip fetches: about the time memory takes to answer.
constexpr int FETCH_DISTANCE = 4096;

// One strip reads the panel once, from memory: what is stored is unpacked in registers.
inline void multiply_strip(const PackedRows& rows, const Weight& w, const uint8_t* panel, int strip, float* sums) {
  const int size = rows.strips.size(strip);
  const float* x = rows.x + static_cast<size_t>(rows.strips.begin(strip)) * w.k;
  const int ahead = w.storage == STORAGE_F32 && size >= 6 ? PANEL * static_cast<int>(sizeof(float)) : 0;
  multiply_for(w.storage, size)(Pass{x, panel, w.k, sums, false, panel + FETCH_DISTANCE, ahead});
}

// Block by block of a panel, several strips: a block is unpacked once and read from the cache by each; while they do so
// the next block is fetched, a line for each k.
inline void multiply_tile(const PackedRows& rows, const Weight& w, int panel, int first_strip, int last_strip, float* sums) {
  const uint8_t* data = w.panels + static_cast<size_t>(panel) * panel_bytes(w.storage, w.k);
  if (last_strip - first_strip == 1) return multiply_strip(rows, w, data, first_strip, sums);
  const Strips& strips = rows.strips;
  const int row0 = strips.begin(first_strip);
  const bool plain = w.storage == STORAGE_F32;
  float* unpacked = plain ? nullptr : scratch<float>(SLOT_UNPACKED, K_BLOCK * PANEL);
  for (int k = 0; k < w.k; k += K_BLOCK) {
    const int count = std::min(K_BLOCK, w.k - k);
    const uint8_t* block = data + panel_bytes(w.storage, k);
    if (!plain) unpack_panel(w.storage, block, count, unpacked);
    const uint8_t* from = plain ? block : reinterpret_cast<const uint8_t*>(unpacked);
    const size_t bytes = panel_bytes(w.storage, count);
    size_t fetched = 0;
    for (int s = first_strip; s < last_strip; s++) {
      const int begin = strips.begin(s), size = strips.size(s);
      const float* x = rows.x + static_cast<size_t>(begin) * w.k + static_cast<size_t>(k) * size;
      const int step = fetched < bytes && !(plain && s == first_strip) ? 64 : 0;  // the first to read from memory waits as it is
      multiply_for(STORAGE_F32, size)(Pass{x, from, count, sums + (begin - row0) * PANEL, k > 0, block + bytes + fetched, step});
      fetched += static_cast<size_t>(step) * count;
    }
  }
}

// A product is cut into tiles of some panels and up to ROWS_PER_TILE rows, whoever is free taking the next.
// multiply(panel, first strip, last strip, sums); finish(sums, panel, row, rows): sums[rows][32] of `group` consecutive
// panels, one after another. Each element is handed over once, by the thread that computed it.
template <class Multiply, class Finish>
void product_tiles(const Strips& strips, int strips_per_tile, const Weight& w, int group, Multiply&& multiply, Finish&& finish) {
  if (strips.rows == 0) return;
  const int groups = panel_count(w.n) / group;
  const int row_tiles = (strips.count + strips_per_tile - 1) / strips_per_tile;
  const int64_t operations = static_cast<int64_t>(w.k) * PANEL * group * (std::min(strips.rows, ROWS_PER_TILE) + 3);
  const int grain = static_cast<int>(std::clamp<int64_t>(TILE_OPERATIONS / operations, 1, std::max(1, groups / 8)));
  const int tiles = (groups + grain - 1) / grain;
  parallel(tiles * row_tiles, [&](int index) {
    const int first = (index % row_tiles) * strips_per_tile;
    const int last = std::min(first + strips_per_tile, strips.count);
    const int row = strips.begin(first), count = strips.begin(last) - row;
    float* sums = scratch<float>(SLOT_TILE, static_cast<size_t>(group) * (ROWS_PER_TILE + MAX_STRIP) * PANEL);
    const int g0 = (index / row_tiles) * grain;
    for (int g = g0; g < std::min(g0 + grain, groups); g++) {
      for (int i = 0; i < group; i++)
        multiply(g * group + i, first, last, sums + static_cast<size_t>(i) * count * PANEL);
      finish(sums, g * group, row, count);
    }
  });
}

template <class Finish>
void product(const PackedRows& rows, const Weight& w, int group, Finish&& finish) {
  auto multiply = [&](int panel, int first, int last, float* sums) { multiply_tile(rows, w, panel, first, last, sums); };
  product_tiles(rows.strips, ROWS_PER_TILE / MAX_STRIP, w, group, multiply, finish);
}

// y = sums (+ bias) (+ residual), cut at column n.
struct RowMajorOutput {
  float* y;
  int64_t ldy;
  const float* residual;  // may be y itself, or null
  int64_t ld_residual;
};
void finish_rows(const RowMajorOutput& out, const Weight& w, const float* sums, int panel, int row, int rows);

inline void linear(const PackedRows& rows, const Weight& w, const RowMajorOutput& out) {
  product(rows, w, 1, [&](const float* sums, int panel, int row, int count) { finish_rows(out, w, sums, panel, row, count); });
}

}  // namespace hr

#endif
