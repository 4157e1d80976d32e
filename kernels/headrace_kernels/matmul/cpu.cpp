// Matrix products in fp32 arithmetic, and the entry points of packing and multiplying.
#include "../native/export.h"
#include "product.h"

namespace hr {

Multiply multiply_for(int storage, int rows) {
  return with_storage(storage, [&](auto policy) -> Multiply {
    constexpr int direct = direct_rows<decltype(policy)>();
    if (rows > direct) return nullptr;
    return choose_multiply<decltype(policy)>(rows, std::make_integer_sequence<int, direct>{});
  });
}

namespace {

template <class S>
void unpack(const uint8_t* panel, int k_count, float* out) {
  for (int k = 0; k < k_count; k += S::STEP) {
    const uint8_t* group = panel + S::bytes(k);
    for (int column = 0; column < PANEL; column += LANES) {
      const typename S::Scale scale = S::scale(group, column);
      for (int chunk = 0; chunk < S::STEP / S::CHUNK; chunk++) {
        const typename S::Words words = S::words(group, chunk, column);
        float* to = out + (k + chunk * S::CHUNK) * PANEL + column;
        repeat<S::CHUNK>([&](auto j) HR_LAMBDA {
          store(to + j * PANEL, S::template weight<decltype(j)::value>(words, scale));
        });
      }
    }
  }
}

// One column of a panel. Sixteen are made and one is kept: an embedding row is read once a token.
template <class S>
void gather_column(const uint8_t* panel, int k_count, int column, float* out) {
  const int first = column & ~(LANES - 1);
  float lanes[LANES];
  for (int k = 0; k < k_count; k += S::STEP) {
    const uint8_t* group = panel + S::bytes(k);
    const typename S::Scale scale = S::scale(group, first);
    for (int chunk = 0; chunk < S::STEP / S::CHUNK; chunk++) {
      const typename S::Words words = S::words(group, chunk, first);
      repeat<S::CHUNK>([&](auto j) HR_LAMBDA {
        store(lanes, S::template weight<decltype(j)::value>(words, scale));
        out[k + chunk * S::CHUNK + j] = lanes[column - first];
      });
    }
  }
}

}  // namespace

void unpack_panel(int storage, const uint8_t* panel, int k_count, float* out) {
  with_storage(storage, [&](auto policy) { unpack<decltype(policy)>(panel, k_count, out); });
}

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

void gather_rows(const Weight& w, const int64_t* ids, int count, float* out) {
  const size_t bytes = panel_bytes(w.storage, w.k);
  parallel(count, [&](int i) {
    const uint8_t* panel = w.panels + static_cast<size_t>(ids[i] / PANEL) * bytes;
    const int column = static_cast<int>(ids[i] % PANEL);
    float* row = out + static_cast<size_t>(i) * w.k;
    with_storage(w.storage, [&](auto policy) { gather_column<decltype(policy)>(panel, w.k, column, row); });
  });
}

}  // namespace hr

using namespace hr;

HR_EXPORT void hr_linear(const Weight* w, const float* x, int64_t ldx, int32_t rows, float* y, int64_t ldy,
                         const float* residual, int64_t ld_residual) {
  linear(pack_rows(x, ldx, rows, w->k), *w, {y, ldy, residual, ld_residual});
}

HR_EXPORT void hr_gather_rows(const Weight* w, const int64_t* ids, int32_t count, float* out) {
  gather_rows(*w, ids, count, out);
}
