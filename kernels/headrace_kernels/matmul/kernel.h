// The micro-kernel: MR rows of activations times one panel, over a range of k.
#ifndef HEADRACE_MATMUL_KERNEL_H
#define HEADRACE_MATMUL_KERNEL_H

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
  explicit Strips(int rows) : rows(rows), count((rows + MAX_STRIP - 1) / MAX_STRIP) {}
  int begin(int strip) const { return static_cast<int>(static_cast<int64_t>(rows) * strip / count); }
  int size(int strip) const { return begin(strip + 1) - begin(strip); }
  int of(int row) const {
    int strip = static_cast<int>(static_cast<int64_t>(row) * count / rows);
    while (begin(strip + 1) <= row) strip++;
    return strip;
  }
};

// sums[r][32] (+)= x[k][r] * W: for each element one chain of fused multiply-adds in the order of k, whatever MR, NV
// and the cuts of k are: those only decide where the chain rests in memory.
template <class S, int MR, int NV>
HR_INLINE void multiply_columns(const float* x, const uint8_t* panel, int column, int k_count, float* sums, bool resume) {
  F16 acc[MR][NV];
  repeat<MR>([&](auto r) HR_LAMBDA {
    repeat<NV>([&](auto v) HR_LAMBDA { acc[r][v] = resume ? load(sums + r * PANEL + column + v * LANES) : zero(); });
  });
  for (int k = 0; k < k_count; k += S::STEP) {
    const uint8_t* group = panel + S::bytes(k);
    typename S::Scale scale[NV];
    repeat<NV>([&](auto v) HR_LAMBDA { scale[v] = S::scale(group, column + v * LANES); });
    for (int chunk = 0; chunk < S::STEP / S::CHUNK; chunk++) {
      typename S::Words words[NV];
      repeat<NV>([&](auto v) HR_LAMBDA { words[v] = S::words(group, chunk, column + v * LANES); });
      repeat<S::CHUNK>([&](auto j) HR_LAMBDA {
        F16 w[NV];
        repeat<NV>([&](auto v) HR_LAMBDA { w[v] = S::template weight<decltype(j)::value>(words[v], scale[v]); });
        repeat<MR>([&](auto r) HR_LAMBDA {
          F16 a = set1(x[r]);
          repeat<NV>([&](auto v) HR_LAMBDA { acc[r][v] = fma(a, w[v], acc[r][v]); });
        });
        x += MR;
      });
    }
  }
  repeat<MR>([&](auto r) HR_LAMBDA {
    repeat<NV>([&](auto v) HR_LAMBDA { store(sums + r * PANEL + column + v * LANES, acc[r][v]); });
  });
}

template <class S, int MR>
void multiply(const float* x, const uint8_t* panel, int k_count, float* sums, bool resume) {
  constexpr int NV = vectors_for(MR);
  for (int column = 0; column < PANEL; column += NV * LANES)
    multiply_columns<S, MR, NV>(x, panel, column, k_count, sums, resume);
}

using Multiply = void (*)(const float* x, const uint8_t* panel, int k_count, float* sums, bool resume);

template <class S, int... I>
Multiply choose_multiply(int rows, std::integer_sequence<int, I...>) {
  static constexpr Multiply table[] = {multiply<S, I + 1>...};
  return table[rows - 1];
}

template <class S>
constexpr int direct_rows() { return S::DIRECT_ROWS < MAX_STRIP ? S::DIRECT_ROWS : MAX_STRIP; }

}  // namespace hr

#endif
