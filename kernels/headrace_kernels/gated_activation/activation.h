// act(gate) * up.
#ifndef HEADRACE_GATED_ACTIVATION_H
#define HEADRACE_GATED_ACTIVATION_H

#include "../native/vector_math.h"

namespace hr {

enum Activation : int32_t { ACTIVATION_SILU = 0, ACTIVATION_GELU_TANH = 1, ACTIVATION_GELU_ERF = 2, ACTIVATION_RELU = 3 };

HR_INLINE F16 activate(int activation, F16 x) {
  switch (activation) {
    case ACTIVATION_GELU_TANH: return gelu_tanh(x);
    case ACTIVATION_GELU_ERF: return gelu_erf(x);
    case ACTIVATION_RELU: return max(zero(), x);  // NaN passes in this order
    default: return silu(x);
  }
}

}  // namespace hr

#endif
