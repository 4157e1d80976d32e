// The micro-kernel of byte products: MR rows of a strip times one panel.
#ifndef HEADRACE_MATMUL_INT8_KERNEL_H
#define HEADRACE_MATMUL_INT8_KERNEL_H

#include "dot.h"
#include "quantise.h"

namespace hr {

constexpr int INT8_VECTORS = REGISTERS >= 32 ? 2 : 1;

// Byte weights of one group: of its WORDS loads, each makes PARTS words of four k's, in order.
struct Bytes8 {
  using Storage = Q8_0;
  static constexpr int BITS = 8, ZERO = 128, WORDS = 8, PARTS = 1;
  static constexpr bool MINIMUM = false;
  template <int> static HR_INLINE I16 part(I16 w) { return w; }
};
template <bool MIN> struct Bytes4 {
  using Storage = Q4<MIN>;
  static constexpr int BITS = 4, ZERO = MIN ? 0 : 8, WORDS = 4, PARTS = 2;
  static constexpr bool MINIMUM = MIN;
  template <int I> static HR_INLINE I16 part(I16 w) { return I == 0 ? nibbles_low(w) : nibbles_high(w); }
};

// The exact sums of one group.
template <class B, int MR, int NV>
struct GroupSums {
  using S = typename B::Storage;
  using Sum = Dot<B::BITS, B::ZERO>;
  static constexpr bool UNROLLED = REGISTERS >= 32;
  Sum dot[MR][NV];

  HR_INLINE GroupSums(const uint8_t* panel, int column, const int32_t* words, const int32_t* corrections) {
    repeat<MR>([&](auto r) HR_LAMBDA {
      repeat<NV>([&](auto v) HR_LAMBDA { dot[r][v] = Sum::start(corrections + r); });
    });
    auto add_word = [&](auto c) HR_LAMBDA {
      I16 stored[NV];
      repeat<NV>([&](auto v) HR_LAMBDA { stored[v] = S::words(panel, c, column + v * LANES); });
      repeat<B::PARTS>([&](auto i) HR_LAMBDA {
        I16 w[NV];
        repeat<NV>([&](auto v) HR_LAMBDA { w[v] = B::template part<decltype(i)::value>(stored[v]); });
        const auto at = c * B::PARTS + i;
        repeat<MR>([&](auto r) HR_LAMBDA {
          repeat<NV>([&](auto v) HR_LAMBDA { dot[r][v].add(w[v], words[at * MR + r]); });
        });
      });
    };
    if constexpr (UNROLLED) repeat<B::WORDS>(add_word);
    else for (int c = 0; c < B::WORDS; c++) add_word(c);
  }

  HR_INLINE F16 total(int r, int v, const int32_t* correction) const { return to_float(dot[r][v].finish(correction)); }
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
    const int32_t* corrections = words + 9 * MR;
    const float* offsets = reinterpret_cast<const float*>(words + 10 * MR);
    if (ahead) {
      fetch(ahead, S::GROUP_BYTES);
      ahead += S::GROUP_BYTES;
    }
    const GroupSums<B, MR, NV> group(panel, column, words, corrections);
    repeat<NV>([&](auto v) HR_LAMBDA {
      const uint16_t* half = reinterpret_cast<const uint16_t*>(panel) + column + v * LANES;
      const F16 d = load_half(half), m = B::MINIMUM ? load_half(half + PANEL) : d;
      repeat<MR>([&](auto r) HR_LAMBDA {
        acc[r][v] = fma(group.total(r, v, corrections + r), mul(d, set1(scales[r])), acc[r][v]);
        if constexpr (B::MINIMUM) acc[r][v] = fma(m, set1(offsets[r]), acc[r][v]);
      });
    });
  }
  repeat<MR>([&](auto r) HR_LAMBDA {
    repeat<NV>([&](auto v) HR_LAMBDA { store(sums + r * PANEL + column + v * LANES, acc[r][v]); });
  });
}

template <class B, int MR>
void multiply_int8(const uint8_t* x, const uint8_t* panel, int groups, float* sums, bool resume, const uint8_t* ahead) {
  for (int column = 0; column < PANEL; column += INT8_VECTORS * LANES)
    multiply_int8_columns<B, MR, INT8_VECTORS>(x, panel, column, groups, sums, resume, column == 0 ? ahead : nullptr);
}

using MultiplyInt8 = void (*)(const uint8_t* x, const uint8_t* panel, int groups, float* sums, bool resume, const uint8_t* ahead);

}  // namespace hr

#endif
