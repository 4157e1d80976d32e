#include "rotary.h"

#include "../native/export.h"
#include "../native/pool.h"
#include "../paged_attention/kv_element.h"
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

constexpr float SMALLEST_LARGEST = 1e-30f;  // below it a head is zeros: 127 divided by it must be finite

// The scale of a head kept in bytes, and its inverse.
float byte_scale(const float* head, int width, float& inverse) {
  F16 largest = zero(), poison = zero();
  for (int i = 0; i < width; i += LANES) {
    const F16 x = load_up_to(head + i, width - i);
    largest = max(max(x, negate(x)), largest);
    poison = add(poison, mul(x, zero()));  // NaN where x is not finite
  }
  const float top = highest(largest), not_finite = sum(poison);
  inverse = not_finite == 0.0f && top > SMALLEST_LARGEST ? 127.0f / top : 0.0f;
  return not_finite == 0.0f ? (inverse > 0.0f ? top / 127.0f : 0.0f) : not_finite;
}

// Element i of the head goes to `to` + i * step.
template <class Kv>
void keep(const float* head, int width, typename Kv::Element* to, int64_t step, float* scale) {
  float inverse = 1.0f;
  if constexpr (Kv::SCALED) *scale = byte_scale(head, width, inverse);
  for (int i = 0; i < width; i += LANES) {
    const int n = std::min(LANES, width - i);
    F16 x = load_up_to(head + i, n);
    if constexpr (Kv::SCALED) x = inverse > 0.0f ? mul(x, set1(inverse)) : zero();
    if (step == 1 && n == LANES) {
      Kv::store(to + i, x);
      continue;
    }
    typename Kv::Element lanes[LANES];
    Kv::store(lanes, x);
    for (int j = 0; j < n; j++) to[(i + j) * step] = lanes[j];
  }
}

template <class Kv>
void write_rows(const AttentionShape& shape, const RotaryOptions& options, float* qkv, int tokens,
                const int64_t* positions, const int64_t* slots, const KvCache& cache) {
  using Element = typename Kv::Element;
  const int bs = shape.block_size;
  const int64_t width = static_cast<int64_t>(shape.heads + shape.kv_heads) * shape.k_dim +
                        static_cast<int64_t>(shape.kv_heads) * shape.v_dim;
  parallel_rows(tokens, [&](int t) {
    float* head = qkv + t * width;
    for (int h = 0; h < shape.heads; h++, head += shape.k_dim) prepare(head, options.q_norm, shape, options, positions[t]);
    const int64_t block = slots[t] / bs * shape.kv_heads, offset = slots[t] % bs;
    for (int h = 0; h < shape.kv_heads; h++, head += shape.k_dim) {
      prepare(head, options.k_norm, shape, options, positions[t]);
      keep<Kv>(head, shape.k_dim, static_cast<Element*>(cache.keys) + (block + h) * shape.k_dim * bs + offset, bs,
               Kv::SCALED ? cache.key_scales + (block + h) * bs + offset : nullptr);
    }
    for (int h = 0; h < shape.kv_heads; h++, head += shape.v_dim)
      keep<Kv>(head, shape.v_dim, static_cast<Element*>(cache.values) + ((block + h) * bs + offset) * shape.v_dim, 1,
               Kv::SCALED ? cache.value_scales + (block + h) * bs + offset : nullptr);
  });
}

}  // namespace

void rotary_kv_write(const AttentionShape& shape, const RotaryOptions& options, float* qkv, int tokens,
                     const int64_t* positions, const int64_t* slots, const KvCache& cache) {
  with_kv(cache.type, [&](auto kv) {
    write_rows<decltype(kv)>(shape, options, qkv, tokens, positions, slots, cache);
  });
}

}  // namespace hr

using namespace hr;

HR_EXPORT void hr_rotary_kv_write(const AttentionShape* shape, const RotaryOptions* options, float* qkv, int32_t tokens,
                                  const int64_t* positions, const int64_t* slots, const KvCache* cache) {
  rotary_kv_write(*shape, *options, qkv, tokens, positions, slots, *cache);
}
