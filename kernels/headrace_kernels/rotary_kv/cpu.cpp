#include "rotary.h"

#include "../native/export.h"
#include "../native/pool.h"
#include "../rms_norm/norm.h"

namespace hr {
namespace {

// One fused and one plain product for each output, sixteen pairs at a time or one.
void rotate(float* head, const RotaryOptions& options, int64_t position) {
  const int half = options.dims / 2;
  if (half % LANES == 0 && !options.interleaved) {
    for (int i = 0; i < half; i += LANES) {
      const F16 a = load(head + i), b = load(head + half + i);
      const F16 c = load(options.cosines + position * half + i), s = load(options.sines + position * half + i);
      store(head + i, fma(a, c, negate(mul(b, s))));
      store(head + half + i, fma(b, c, mul(a, s)));
    }
    return;
  }
  const float* cosines = options.cosines + position * half;
  const float* sines = options.sines + position * half;
  const int step = options.interleaved ? 2 : 1, apart = options.interleaved ? 1 : half;
  for (int i = 0; i < half; i++) {
    float &a = head[i * step], &b = head[i * step + apart];
    const float first = __builtin_fmaf(a, cosines[i], -(b * sines[i]));
    const float second = __builtin_fmaf(b, cosines[i], a * sines[i]);
    a = first;
    b = second;
  }
}

void norm_head(float* head, const float* weight, int width, float epsilon) {
  normalise(head, weight, width, epsilon, [&](int i, F16 y, int n) HR_LAMBDA {
    if (n == LANES) store(head + i, y);
    else store_first(head + i, y, n);
  });
}

void prepare(float* head, const float* norm, const AttentionShape& shape, const RotaryOptions& options, int64_t position) {
  if (norm) norm_head(head, norm, shape.k_dim, options.epsilon);
  if (options.cosines) rotate(head, options, position);
}

}  // namespace

void rotary_kv_write(const AttentionShape& shape, const RotaryOptions& options, float* qkv, int tokens,
                     const int64_t* positions, const int64_t* slots, float* keys, float* values) {
  const int bs = shape.block_size;
  const int64_t width = static_cast<int64_t>(shape.heads + shape.kv_heads) * shape.k_dim +
                        static_cast<int64_t>(shape.kv_heads) * shape.v_dim;
  auto token = [&](int t) {
    float* head = qkv + t * width;
    for (int h = 0; h < shape.heads; h++, head += shape.k_dim) prepare(head, options.q_norm, shape, options, positions[t]);
    const int64_t block = slots[t] / bs * shape.kv_heads, offset = slots[t] % bs;
    for (int h = 0; h < shape.kv_heads; h++, head += shape.k_dim) {
      prepare(head, options.k_norm, shape, options, positions[t]);
      float* to = keys + (block + h) * shape.k_dim * bs + offset;
      for (int i = 0; i < shape.k_dim; i++) to[static_cast<int64_t>(i) * bs] = head[i];
    }
    for (int h = 0; h < shape.kv_heads; h++, head += shape.v_dim)
      std::memcpy(values + ((block + h) * bs + offset) * shape.v_dim, head, sizeof(float) * shape.v_dim);
  };
  parallel_rows(tokens, token);
}

}  // namespace hr

using namespace hr;

HR_EXPORT void hr_rotary_kv_write(const AttentionShape* shape, const RotaryOptions* options, float* qkv, int32_t tokens,
                                  const int64_t* positions, const int64_t* slots, float* keys, float* values) {
  rotary_kv_write(*shape, *options, qkv, tokens, positions, slots, keys, values);
}
