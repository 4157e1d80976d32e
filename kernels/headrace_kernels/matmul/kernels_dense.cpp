// The micro-kernels, for all heights of a strip. Weights stored as floating-point numbers.
#include "kernel.h"

namespace hr {

Multiply multiply_dense(int storage, int rows) {
  switch (storage) {
    case STORAGE_BF16: return choose_multiply<BFloat16>(rows);
    case STORAGE_F16: return choose_multiply<Float16>(rows);
    default: return choose_multiply<Float32>(rows);
  }
}

}  // namespace hr
