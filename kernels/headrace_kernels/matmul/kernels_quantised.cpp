// The micro-kernels that unpack as they multiply, for all heights of a strip. Weights stored as GGUF blocks.
#include "kernel.h"

namespace hr {

Multiply multiply_quantised(int storage, int rows) {
  switch (storage) {
    case STORAGE_Q4_0: return choose_multiply<Q4_0>(rows);
    case STORAGE_Q4_1: return choose_multiply<Q4_1>(rows);
    default: return choose_multiply<Q8_0>(rows);
  }
}

}  // namespace hr
