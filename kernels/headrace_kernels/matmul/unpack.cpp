// From panels back to fp32: blocks, single rows, everything.
#include "../native/export.h"
#include "product.h"

namespace hr {
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

HR_EXPORT void hr_gather_rows(const Weight* w, const int64_t* ids, int32_t count, float* out) {
  gather_rows(*w, ids, count, out);
}
HR_EXPORT void hr_unpack(const Weight* w, float* out) {
  const size_t bytes = panel_bytes(w->storage, w->k);
  parallel(panel_count(w->n), [&](int p) {
    float* panel = scratch<float>(SLOT_UNPACKED, static_cast<size_t>(w->k) * PANEL);
    unpack_panel(w->storage, w->panels + p * bytes, w->k, panel);
    for (int c = 0; c < std::min(PANEL, w->n - p * PANEL); c++)
      for (int i = 0; i < w->k; i++) out[static_cast<size_t>(p * PANEL + c) * w->k + i] = panel[i * PANEL + c];
  });
}
