#include "activation.h"

#include "../native/export.h"
#include "../native/pool.h"
#include "../rms_norm/norm.h"

using namespace hr;

// gate_up[rows][2 * width], gates first, to out[rows][width].
HR_EXPORT void hr_gated_activation(int32_t activation, const float* gate_up, int32_t rows, int32_t width, float* out) {
  const RowSink sink = RowSink::row_major(out, width);
  parallel_rows(rows, [&](int r) {
    RowSink::Row to = sink.row(r);
    const float* gate = gate_up + static_cast<size_t>(r) * 2 * width;
    for (int i = 0; i < width; i += LANES) {
      const int n = width - i < LANES ? width - i : LANES;
      to.put(i, mul(activate(activation, load_up_to(gate + i, n)), load_up_to(gate + width + i, n)), n);
    }
  });
}
