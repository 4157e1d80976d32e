// The micro-kernel: MR rows of activations times one panel, over a range of k.
#ifndef HEADRACE_MATMUL_KERNEL_H
#define HEADRACE_MATMUL_KERNEL_H

#include <type_traits>

#include "storage.h"

namespace hr {

// Rows of activations are taken in strips of at most MAX_STRIP, each stored [K][rows of the strip].
// An AVX-512 machine holds 12 x 32 sums in 24 of its 32 registers; AVX2 6 x 16 in 12 of 16.
constexpr int MAX_STRIP = REGISTERS >= 32 ? 12 : REGISTERS >= 8 ? 6 : 4;
// Columns a pass: narrow when many rows fill the registers. One or two rows need more columns, so that there are
// enough independent chains of additions.
constexpr int vectors_for(int rows) { return REGISTERS >= 32 || rows <= 2 ? 2 : 1; }

// How a strip's share of `rows` rows is cut: as even as can be, since a nearly empty strip costs as much as a full one.
struct Strips {
  int rows, count;
  explicit Strips(int rows, int longest = MAX_STRIP) : rows(rows), count((rows + longest - 1) / longest) {}
  int begin(int strip) const { return static_cast<int>(static_cast<int64_t>(rows) * strip / count); }
  int size(int strip) const { return begin(strip + 1) - begin(strip); }
  int of(int row) const {
    int strip = static_cast<int>(static_cast<int64_t>(row) * count / rows);
    while (begin(strip + 1) <= row) strip++;
    return strip;
  }
};

// One strip times one block of a panel.
struct Pass {
  const float* x;        // [k_count][rows]
  const uint8_t* panel;
  int k_count;
  float* sums;           // [rows][32]
  bool resume;           // go on from what sums holds
  const uint8_t* ahead;  // memory needed soon, of which this pass fetches `ahead_step` bytes for each k
  int ahead_step;        // 0: none
};

// Reads go to memory that another block of work needs: the processor's own prefetcher starts anew at each block.
HR_INLINE void fetch(const uint8_t* p, int bytes) {
  for (int i = 0; i < bytes; i += 64) __builtin_prefetch(p + i, 0, 2);
}

// The sums of MR rows and NV registers of columns. For each element one chain of fused multiply-adds in the order of k,
// whatever MR, NV and the cuts of k are: those only decide where the chain rests in memory.
template <int MR, int NV>
struct Sums {
  F16 acc[MR][NV];
  HR_INLINE Sums(const float* sums, bool resume) {
    if (resume) each([&](auto r, auto v) HR_LAMBDA { acc[r][v] = load(sums + r * PANEL + v * LANES); });
    else each([&](auto r, auto v) HR_LAMBDA { acc[r][v] = zero(); });
  }
  // x: one k of each row; w: that k of the columns.
  HR_INLINE void add(const float* x, const F16* w) {
    repeat<MR>([&](auto r) HR_LAMBDA {
      const F16 a = set1(x[r]);
      repeat<NV>([&](auto v) HR_LAMBDA { acc[r][v] = fma(a, w[v], acc[r][v]); });
    });
  }
  HR_INLINE void save(float* sums) const {
    each([&](auto r, auto v) HR_LAMBDA { store(sums + r * PANEL + v * LANES, acc[r][v]); });
  }

 private:
  template <class F>
  static HR_INLINE void each(F&& f) {
    repeat<MR>([&](auto r) HR_LAMBDA { repeat<NV>([&](auto v) HR_LAMBDA { f(r, v); }); });
  }
};

template <int MR, int NV>
HR_INLINE void multiply_floats(const Pass& pass, int column) {
  Sums<MR, NV> sums(pass.sums + column, pass.resume);
  const float* x = pass.x;
  const float* w = reinterpret_cast<const float*>(pass.panel) + column;
  const float* const end = w + static_cast<size_t>(pass.k_count) * PANEL;
  const uint8_t* ahead = pass.ahead;
  const int step = pass.ahead_step;
  for (; w != end; w += PANEL, x += MR, ahead += step) {
    __builtin_prefetch(ahead, 0, 2);
    F16 columns[NV];
    repeat<NV>([&](auto v) HR_LAMBDA { columns[v] = load(w + v * LANES); });
    sums.add(x, columns);
  }
  sums.save(pass.sums + column);
}

template <class S, int MR, int NV>
HR_INLINE void multiply_stored(const Pass& pass, int column) {
  Sums<MR, NV> sums(pass.sums + column, pass.resume);
  const float* x = pass.x;
  for (int k = 0; k < pass.k_count; k += S::STEP) {
    const uint8_t* group = pass.panel + S::bytes(k);
    typename S::Scale scale[NV];
    repeat<NV>([&](auto v) HR_LAMBDA { scale[v] = S::scale(group, column + v * LANES); });
    for (int chunk = 0; chunk < S::STEP / S::CHUNK; chunk++) {
      typename S::Words words[NV];
      repeat<NV>([&](auto v) HR_LAMBDA { words[v] = S::words(group, chunk, column + v * LANES); });
      repeat<S::CHUNK>([&](auto j) HR_LAMBDA {
        F16 w[NV];
        repeat<NV>([&](auto v) HR_LAMBDA { w[v] = S::template weight<decltype(j)::value>(words[v], scale[v]); });
        sums.add(x, w);
        x += MR;
      });
    }
  }
  sums.save(pass.sums + column);
}

template <class S, int MR>
void multiply(const Pass& pass) {
  constexpr int NV = vectors_for(MR);
  for (int column = 0; column < PANEL; column += NV * LANES) {
    if constexpr (std::is_same<S, Float32>::value) multiply_floats<MR, NV>(pass, column);
    else multiply_stored<S, MR, NV>(pass, column);
  }
}

using Multiply = void (*)(const Pass&);

template <class S, int... I>
Multiply choose_multiply(int rows, std::integer_sequence<int, I...>) {
  static constexpr Multiply table[] = {multiply<S, I + 1>...};
  return table[rows - 1];
}
template <class S>
Multiply choose_multiply(int rows) {
  return choose_multiply<S>(rows, std::make_integer_sequence<int, MAX_STRIP>{});
}

// In files of their own, which compile side by side.
Multiply multiply_dense(int storage, int rows);
Multiply multiply_quantised(int storage, int rows);

inline Multiply multiply_for(int storage, int rows) {
  return storage >= STORAGE_Q8_0 ? multiply_quantised(storage, rows) : multiply_dense(storage, rows);
}

}  // namespace hr

#endif
