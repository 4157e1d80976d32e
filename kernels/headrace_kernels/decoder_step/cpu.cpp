// One step of a decoder in one call: embeddings, layers, logits of the wanted rows.
#include "decoder.h"

#include "../native/export.h"
#include "../rms_norm/norm.h"

namespace hr {
namespace {

class Run {
 public:
  Run(const Decoder& decoder, const Step& step) : d_(decoder), step_(step), rows_(step.tokens) {
    const AttentionShape& s = d_.shape;
    attention_width_ = s.heads * s.v_dim;
    qkv_width_ = (s.heads + s.kv_heads) * s.k_dim + s.kv_heads * s.v_dim;
    const size_t tokens = step.tokens, input_width = std::max(d_.hidden, attention_width_);
    const size_t inputs = std::max(tokens, size_t(step.row_count));  // a row can be wanted more than once
    const size_t sizes[] = {tokens * d_.hidden, inputs * input_width, tokens * qkv_width_, tokens * d_.intermediate,
                            tokens * d_.hidden};
    size_t total = 0;
    for (size_t size : sizes) total += aligned(size);
    float* memory = scratch<float>(SLOT_STEP, total);
    float** buffers[] = {&x_, &input_, &qkv_, &gated_, &block_};
    for (int i = 0; i < 5; i++) {
      *buffers[i] = memory;
      memory += aligned(sizes[i]);
    }
  }

  void run() {
    embed();
    for (int i = 0; i < d_.layer_count; i++) {
      attend(d_.layers[i]);
      feed_forward(d_.layers[i]);
    }
    logits();
  }

 private:
  static size_t aligned(size_t floats) { return (floats + LANES - 1) / LANES * LANES; }

  void embed() {
    gather_rows(*d_.embedding, step_.token_ids, rows_, x_);
    if (d_.embedding_scale == 1.0f) return;
    parallel_rows(rows_, [&](int r) {
      float* x = x_ + static_cast<size_t>(r) * d_.hidden;
      for (int i = 0; i < d_.hidden; i++) x[i] *= d_.embedding_scale;
    });
  }

  void attend(const Layer& layer) {
    linear(normed(layer.attention_norm), layer.qkv, {qkv_, qkv_width_, nullptr, 0});
    rotary_kv_write(d_.shape, layer.rotary, qkv_, rows_, step_.positions, step_.slots, layer.keys, layer.values);
    paged_attention(d_.shape, layer.attention, step_.sequences, qkv_, qkv_width_, layer.keys, layer.values,
                    RowSink::strips(input_, attention_width_, rows_));
    add_product({input_, attention_width_, Strips(rows_)}, layer.output, layer.attention_post_norm);
  }

  void feed_forward(const Layer& layer) {
    const RowSink sink = RowSink::strips(gated_, d_.intermediate, rows_);
    const Weight& w = layer.gate_up;
    product(normed(layer.mlp_norm), w, 2, [&](const float* sums, int panel, int row, int rows) {
      const int column = panel / 2 * PANEL, width = std::min(PANEL, d_.intermediate - column);
      for (int r = 0; r < rows; r++)
        for (int i = 0; i < width; i += LANES) {
          F16 gate = load(sums + r * PANEL + i), up = load(sums + (rows + r) * PANEL + i);
          if (w.bias) {
            gate = add(gate, load(w.bias + panel * PANEL + i));
            up = add(up, load(w.bias + (panel + 1) * PANEL + i));
          }
          sink.put(row + r, column + i, mul(activate(d_.activation, gate), up), std::min(LANES, width - i));
        }
    });
    add_product({gated_, d_.intermediate, Strips(rows_)}, layer.down, layer.mlp_post_norm);
  }

  // x += scale * product, or x += norm(product).
  void add_product(const PackedRows& input, const Weight& w, const float* post_norm) {
    if (!post_norm && d_.residual_scale == 1.0f) return linear(input, w, {x_, d_.hidden, x_, d_.hidden});
    linear(input, w, {block_, d_.hidden, nullptr, 0});
    parallel_rows(rows_, [&](int r) {
      const size_t at = static_cast<size_t>(r) * d_.hidden;
      if (post_norm) return add_norm_row(x_ + at, block_ + at, post_norm, d_.hidden, d_.epsilon);
      for (int i = 0; i < d_.hidden; i++) x_[at + i] += block_[at + i] * d_.residual_scale;
    });
  }

  // norm(x) in strips for the next product.
  PackedRows normed(const float* weight) {
    const RowSink sink = RowSink::strips(input_, d_.hidden, rows_);
    parallel_rows(rows_, [&](int r) {
      rms_norm_row(x_ + static_cast<size_t>(r) * d_.hidden, weight, d_.hidden, d_.epsilon, r, sink);
    });
    return {input_, d_.hidden, Strips(rows_)};
  }

  void logits() {
    const int count = step_.row_count;
    if (count == 0) return;
    const RowSink sink = RowSink::strips(input_, d_.hidden, count);
    parallel_rows(count, [&](int r) {
      rms_norm_row(x_ + step_.rows[r] * d_.hidden, d_.final_norm, d_.hidden, d_.epsilon, r, sink);
    });
    const Weight& head = *d_.head;
    linear({input_, d_.hidden, Strips(count)}, head, {step_.logits, head.n, nullptr, 0});
    if (d_.logit_scale == 1.0f && d_.logit_softcap == 0.0f) return;
    parallel(count, [&](int r) { scale_logits(step_.logits + static_cast<size_t>(r) * head.n, head.n); });
  }

  void scale_logits(float* row, int width) const {
    for (int i = 0; i < width; i += LANES) {
      const int n = std::min(LANES, width - i);
      F16 v = mul(load_up_to(row + i, n), set1(d_.logit_scale));
      if (d_.logit_softcap > 0) v = soft_cap(v, d_.logit_softcap);
      if (n == LANES) store(row + i, v);
      else store_first(row + i, v, n);
    }
  }

  const Decoder& d_;
  const Step& step_;
  const int rows_;
  int attention_width_, qkv_width_;
  float *x_, *input_, *qkv_, *gated_, *block_;
};

}  // namespace
}  // namespace hr

using namespace hr;

HR_EXPORT void hr_decoder_step(const Decoder* decoder, const Step* step) {
  if (step->tokens > 0) Run(*decoder, *step).run();
}
