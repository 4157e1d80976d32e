// The micro-kernel of byte products: MR rows of a strip times one panel.
#ifndef HEADRACE_MATMUL_INT8_KERNEL_H
#define HEADRACE_MATMUL_INT8_KERNEL_H

#include "dot.h"
#include "quantise.h"

namespace hr {

constexpr int int8_vectors_for(int rows) { return REGISTERS >= 32 ? 2 : 1; }

// Byte weights of one group: words(c) are the k's 4 c … 4 c + 3.
struct Bytes8 {
  using Storage = Q8_0;
  static constexpr int BITS = 8, ZERO_BITS = 7, WORDS = 8;
  static constexpr bool MINIMUM = false;
  template <class F> static HR_INLINE void each(I16 w, int c, F&& f) { f(w, c); }
};
template <bool MIN> struct Bytes4 {
  using Storage = Q4<MIN>;
  static constexpr int BITS = 4, ZERO_BITS = MIN ? -1 : 3, WORDS = 4;
  static constexpr bool MINIMUM = MIN;
  template <class F> static HR_INLINE void each(I16 w, int c, F&& f) {
    f(nibbles_low(w), 2 * c);
    f(nibbles_high(w), 2 * c + 1);
  }
};

// sums[r][32] (+)= for each group, in order: (exact integer sum) * (weight scale * activation scale), and for Q4_1 the
// minimum times the activations' sum. `ahead`: as many bytes of memory needed soon, or null.
template <class B, int MR, int NV>
HR_INLINE void multiply_int8_columns(const uint8_t* x, const uint8_t* panel, int column, int groups, float* sums, bool resume, const uint8_t* ahead) {
  using S = typename B::Storage;
  F16 acc[MR][NV];
  repeat<MR>([&](auto r) HR_LAMBDA {
    repeat<NV>([&](auto v) HR_LAMBDA { acc[r][v] = resume ? load(sums + r * PANEL + column + v * LANES) : zero(); });
  });
  for (int g = 0; g < groups; g++, panel += S::GROUP_BYTES, x += MR * QuantisedRows::GROUP_BYTES) {
    const int32_t* words = reinterpret_cast<const int32_t*>(x);
    const float* scales = reinterpret_cast<const float*>(words + 8 * MR);
    const int32_t* minus_sums = words + 9 * MR;
    const float* offsets = reinterpret_cast<const float*>(words + 10 * MR);
    using Sum = Dot<B::BITS, B::ZERO_BITS>;
    Sum dot[MR][NV];
    repeat<MR>([&](auto r) HR_LAMBDA {
      repeat<NV>([&](auto v) HR_LAMBDA { dot[r][v] = Sum::start(minus_sums + r); });
    });
    if (ahead) {
      fetch(ahead, S::GROUP_BYTES);
      ahead += S::GROUP_BYTES;
    }
    for (int c = 0; c < B::WORDS; c++) {
      repeat<NV>([&](auto v) HR_LAMBDA {
        B::each(S::words(panel, c, column + v * LANES), c, [&](I16 w, int at) HR_LAMBDA {
          repeat<MR>([&](auto r) HR_LAMBDA { dot[r][v].add(w, words[at * MR + r]); });
        });
      });
    }
    repeat<NV>([&](auto v) HR_LAMBDA {
      const uint16_t* half = reinterpret_cast<const uint16_t*>(panel) + column + v * LANES;
      const F16 d = load_half(half);
      repeat<MR>([&](auto r) HR_LAMBDA {
        const F16 total = to_float(dot[r][v].finish(minus_sums + r));
        acc[r][v] = fma(total, mul(d, set1(scales[r])), acc[r][v]);
        if constexpr (B::MINIMUM) acc[r][v] = fma(load_half(half + PANEL), set1(offsets[r]), acc[r][v]);
      });
    });
  }
  repeat<MR>([&](auto r) HR_LAMBDA {
    repeat<NV>([&](auto v) HR_LAMBDA { store(sums + r * PANEL + column + v * LANES, acc[r][v]); });
  });
}

template <class B, int MR>
void multiply_int8(const uint8_t* x, const uint8_t* panel, int groups, float* sums, bool resume, const uint8_t* ahead) {
  constexpr int NV = int8_vectors_for(MR);
  for (int column = 0; column < PANEL; column += NV * LANES)
    multiply_int8_columns<B, MR, NV>(x, panel, column, groups, sums, resume, column == 0 ? ahead : nullptr);
}

using MultiplyInt8 = void (*)(const uint8_t* x, const uint8_t* panel, int groups, float* sums, bool resume, const uint8_t* ahead);

}  // namespace hr

#endif
