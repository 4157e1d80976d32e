// One step of a decoder in one call: embeddings, layers, logits of the wanted rows.
#include "decoder.h"

#include "../matmul_int8/product.h"
#include "../native/export.h"
#include "../native/stopwatch.h"
#include "../rms_norm/norm.h"

namespace hr {
namespace {

class Run {
 public:
  Run(const Decoder& decoder, const Step& step) : d_(decoder), step_(step), watch_(step.nanoseconds), rows_(step.tokens) {
    const AttentionShape& s = d_.shape;
    attention_width_ = s.heads * s.v_dim;
    qkv_width_ = (s.heads + s.kv_heads) * s.k_dim + s.kv_heads * s.v_dim;
    const size_t tokens = step.tokens, input_width = std::max(d_.hidden, attention_width_);
    const size_t gated_width = std::max(d_.intermediate, attention_width_);
    const size_t inputs = std::max(tokens, size_t(step.row_count));  // a row can be wanted more than once
    const size_t sizes[] = {inputs * d_.hidden, inputs * input_width, inputs * qkv_width_, inputs * gated_width,
                            inputs * d_.hidden};
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
    watch_.lap(PART_EMBEDDING);
    for (int i = 0; i < d_.layer_count; i++) {
      attend(d_.layers[i], i + 1 == d_.layer_count);
      if (rows_ > 0) feed_forward(d_.layers[i]);
    }
    if (rows_ > 0) logits();
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

  void attend(const Layer& layer, bool last) {
    norm_for(layer.qkv, layer.attention_norm);
    linear(layer.qkv, input_, {qkv_, qkv_width_, nullptr, 0});
    watch_.lap(PART_QKV);
    rotary_kv_write(d_.shape, layer.rotary, qkv_, rows_, step_.positions, step_.slots, layer.cache);
    watch_.lap(PART_ROTARY);
    const bool select = last && step_.row_count != rows_;
    // A head whose width is no whole number of groups leaves a group of bytes to two tasks.
    const bool apart = layer.output.int8_activations && d_.shape.v_dim % QUANT_GROUP != 0;
    paged_attention(d_.shape, layer.attention, step_.sequences, qkv_, qkv_width_, layer.cache,
                    select || apart ? RowSink::row_major(gated_, attention_width_) : sink_for(layer.output, input_, rows_));
    if (select) keep_wanted(layer.output);
    else if (apart) parallel_rows(rows_, [&](int r) { put_attention(sink_for(layer.output, input_, rows_), r, r); });
    watch_.lap(PART_ATTENTION);
    add_product(layer.output, input_, layer.attention_post_norm);
    watch_.lap(PART_OUTPUT);
  }

  // From the last layer's attention on, rows without wanted logits are of no more use.
  void keep_wanted(const Weight& w) {
    const int count = step_.row_count;
    const RowSink sink = sink_for(w, input_, count);
    for (int r = 0; r < count; r++) {
      put_attention(sink, r, step_.rows[r]);
      std::memcpy(block_ + static_cast<size_t>(r) * d_.hidden, x_ + step_.rows[r] * d_.hidden, sizeof(float) * d_.hidden);
    }
    std::swap(x_, block_);
    rows_ = count;
    all_wanted_ = true;
  }

  void put_attention(const RowSink& sink, int r, int64_t from_row) const {
    RowSink::Row to = sink.row(r);
    const float* from = gated_ + from_row * attention_width_;
    for (int i = 0; i < attention_width_; i += LANES)
      to.put(i, load_up_to(from + i, attention_width_ - i), std::min(LANES, attention_width_ - i));
  }

  void feed_forward(const Layer& layer) {
    const RowSink sink = sink_for(layer.down, gated_, rows_);
    const Weight& w = layer.gate_up;
    norm_for(w, layer.mlp_norm);
    multiply(w, input_, rows_, 2, [&](const float* sums, int panel, int row, int rows) {
      const int column = panel / 2 * PANEL, width = std::min(PANEL, d_.intermediate - column);
      for (int r = 0; r < rows; r++) {
        RowSink::Row to = sink.row(row + r);
        for (int i = 0; i < width; i += LANES) {
          F16 gate = load(sums + r * PANEL + i), up = load(sums + (rows + r) * PANEL + i);
          if (w.bias) {
            gate = add(gate, load(w.bias + panel * PANEL + i));
            up = add(up, load(w.bias + (panel + 1) * PANEL + i));
          }
          to.put(column + i, mul(activate(d_.activation, gate), up), std::min(LANES, width - i));
        }
      }
    });
    watch_.lap(PART_GATE_UP);
    add_product(layer.down, gated_, layer.mlp_post_norm);
    watch_.lap(PART_DOWN);
  }

  // x += scale * product, or x += norm(product).
  void add_product(const Weight& w, const float* input, const float* post_norm) {
    if (!post_norm && d_.residual_scale == 1.0f) return linear(w, input, {x_, d_.hidden, x_, d_.hidden});
    linear(w, input, {block_, d_.hidden, nullptr, 0});
    parallel_rows(rows_, [&](int r) {
      const size_t at = static_cast<size_t>(r) * d_.hidden;
      if (post_norm) return add_norm_row(x_ + at, block_ + at, post_norm, d_.hidden, d_.epsilon);
      for (int i = 0; i < d_.hidden; i++) x_[at + i] += block_[at + i] * d_.residual_scale;
    });
  }

  // Where the rows that `w` will multiply go: strips of floats, or of bytes, which take less than half the room.
  static RowSink sink_for(const Weight& w, float* buffer, int rows) {
    return w.int8_activations ? RowSink::bytes(buffer, w.k, rows, w.storage) : RowSink::strips(buffer, w.k, rows);
  }

  template <class Finish>
  void multiply(const Weight& w, const float* input, int rows, int group, Finish&& finish) {
    if (w.int8_activations) product(QuantisedRows::at(input, w.k, rows), w, group, finish);
    else product(PackedRows{input, w.k, Strips(rows)}, w, group, finish);
  }

  void linear(const Weight& w, const float* input, const RowMajorOutput& out) { linear(w, input, rows_, out); }
  void linear(const Weight& w, const float* input, int rows, const RowMajorOutput& out) {
    multiply(w, input, rows, 1, [&](const float* sums, int panel, int row, int count) {
      finish_rows(out, w, sums, panel, row, count);
    });
  }

  // norm(x), as the input of the product with w.
  void norm_for(const Weight& w, const float* weight) {
    const RowSink sink = sink_for(w, input_, rows_);
    parallel_rows(rows_, [&](int r) {
      rms_norm_row(x_ + static_cast<size_t>(r) * d_.hidden, weight, d_.hidden, d_.epsilon, r, sink);
    });
    watch_.lap(PART_NORM);
  }

  void logits() {
    const int count = step_.row_count;
    if (count == 0) return;
    const Weight& head = *d_.head;
    const RowSink sink = sink_for(head, input_, count);
    parallel_rows(count, [&](int r) {
      const int64_t row = all_wanted_ ? r : step_.rows[r];
      rms_norm_row(x_ + row * d_.hidden, d_.final_norm, d_.hidden, d_.epsilon, r, sink);
    });
    watch_.lap(PART_NORM);
    linear(head, input_, count, {step_.logits, head.n, nullptr, 0});
    if (d_.logit_scale != 1.0f || d_.logit_softcap != 0.0f)
      parallel(count, [&](int r) { scale_logits(step_.logits + static_cast<size_t>(r) * head.n, head.n); });
    watch_.lap(PART_HEAD);
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
  Stopwatch watch_;
  int rows_;
  bool all_wanted_ = false;  // the rows of x_ are those whose logits are wanted, in order
  int attention_width_, qkv_width_;
  float *x_, *input_, *qkv_, *gated_, *block_;
};

}  // namespace
}  // namespace hr

using namespace hr;

// 0, or 1 where a token id is none of the embedding's rows and nothing was computed.
HR_EXPORT int32_t hr_decoder_step(const Decoder* decoder, const Step* step) {
  for (int i = 0; i < step->tokens; i++)
    if (step->token_ids[i] < 0 || step->token_ids[i] >= decoder->embedding->n) return 1;
  if (step->tokens > 0) Run(*decoder, *step).run();
  return 0;
}
