// Which thread attends to what, the masks, and the online softmax around the products of tile.h.
#include <algorithm>
#include <limits>

#include "../native/export.h"
#include "../native/pool.h"
#include "../native/scratch_slots.h"
#include "../native/vector_math.h"
#include "tile.h"

namespace hr {
namespace {

constexpr float MINUS_INFINITY = -std::numeric_limits<float>::infinity();
constexpr int MAX_ROWS = 48;  // query rows (tokens times heads of a KV head) that share a pass over the keys

int padded(int width) { return (width + LANES - 1) / LANES * LANES; }

// Calls f(integral_constant<rows>) for 1 <= rows <= N.
template <int N, class F>
void with_rows(int rows, F&& f) {
  if constexpr (N > 1) {
    if (rows < N) return with_rows<N - 1>(rows, f);
  }
  f(std::integral_constant<int, N>{});
}

// Consecutive tokens of one sequence, and a KV head with its query heads: the first of `kv_heads` to be done.
struct Task {
  int sequence, first, tokens, kv_head, kv_heads;
};

template <class Kv>
class Attention {
  using Element = typename Kv::Element;

 public:
  Attention(const AttentionShape& shape, const AttentionOptions& options, const Sequences& sequences,
            const float* query, int64_t ld_query, const KvCache& cache, const RowSink& out)
      : shape_(shape), options_(options), sequences_(sequences), query_(query), ld_query_(ld_query), cache_(cache),
        keys_(static_cast<const Element*>(cache.keys)), values_(static_cast<const Element*>(cache.values)), out_(out), group_(shape.heads / shape.kv_heads),
        tokens_per_task_(std::max(1, MAX_ROWS / group_)) {}

  void run() const {
    // All heads of a chunk in one go where there are chunks enough to share out: each head's last tile fetches the
    // next one's first.
    const int chunks = chunk_count(), heads = chunks >= 8 * thread_count() ? shape_.kv_heads : 1;
    const int parts = shape_.kv_heads / heads;
    parallel(chunks * parts, [&](int index) { attend(find(index / parts, index % parts * heads, heads)); });
  }

 private:
  int tokens(int sequence) const { return static_cast<int>(sequences_.cu[sequence + 1] - sequences_.cu[sequence]); }
  int chunks_of(int sequence) const { return (tokens(sequence) + tokens_per_task_ - 1) / tokens_per_task_; }
  int chunk_count() const {
    int count = 0;
    for (int i = 0; i < sequences_.count; i++) count += chunks_of(i);
    return count;
  }

  // Chunks at the end of a long prompt have the most keys: they come first, so that no thread is left with one.
  Task find(int chunk, int kv_head, int kv_heads) const {
    int sequence = sequences_.count - 1;
    while (chunk >= chunks_of(sequence)) chunk -= chunks_of(sequence--);
    const int first = (chunks_of(sequence) - 1 - chunk) * tokens_per_task_;
    return {sequence, first, std::min(tokens_per_task_, tokens(sequence) - first), kv_head, kv_heads};
  }

  // Rows of a task: row r is token r / group_, head r % group_ of the KV head.
  struct Rows {
    int count;
    const float* q[MAX_ROWS + 256];
    float highest[MAX_ROWS + 256], total[MAX_ROWS + 256], decay[MAX_ROWS + 256];
    float* scores;  // [count][TILE_KEYS]
    float* out;     // [count][ld_out]
    int64_t ld_out;
  };

  void attend(Task task) const {
    Rows rows;
    const int64_t first_position = sequences_.starts[task.sequence] + task.first;
    const int64_t end = first_position + task.tokens;
    const int64_t first_key = options_.window ? std::max<int64_t>(0, first_position + 1 - options_.window) : 0;
    const int64_t first_tile = first_key / TILE_KEYS * TILE_KEYS;
    Tile tiles[2];  // while one is computed, the other is fetched
    int now = 0;
    locate(task, task.kv_head, first_tile, end, tiles[0], 0);
    for (const int last_head = task.kv_head + task.kv_heads; task.kv_head < last_head; task.kv_head++) {
      begin(task, rows);
      for (int64_t tile = first_tile; tile < end; tile += TILE_KEYS, now = 1 - now) {
        const bool ends = tile + TILE_KEYS >= end, any = !ends || task.kv_head + 1 < last_head;
        if (any)
          locate(task, task.kv_head + ends, ends ? first_tile : tile + TILE_KEYS, end, tiles[1 - now], 1 - now);
        add_tile(tiles[now], any ? &tiles[1 - now] : nullptr, first_position, rows);
      }
      finish(task, rows);
    }
  }

  void begin(const Task& task, Rows& rows) const {
    rows.count = task.tokens * group_;
    rows.ld_out = padded(shape_.v_dim);
    const size_t out_size = static_cast<size_t>(rows.count) * rows.ld_out;
    rows.out = scratch<float>(SLOT_ATTENTION, out_size + static_cast<size_t>(rows.count) * TILE_KEYS);
    rows.scores = rows.out + out_size;
    std::fill_n(rows.out, out_size, 0.0f);
    const float* q = query_ + (sequences_.cu[task.sequence] + task.first) * ld_query_;
    for (int r = 0; r < rows.count; r++) {
      rows.q[r] = q + r / group_ * ld_query_ + (task.kv_head * group_ + r % group_) * shape_.k_dim;
      rows.highest[r] = MINUS_INFINITY;
      rows.total[r] = 0.0f;
    }
  }

  // Where the keys and values of a tile are.
  struct Tile {
    int64_t first;
    int keys;
    KeyVector<Kv> key_vectors[KEY_VECTORS];  // past the last key, that one again
    const Element* values[TILE_KEYS];
    float key_scales[Kv::SCALED ? TILE_KEYS : 1], value_scales[Kv::SCALED ? TILE_KEYS : 1];
  };

  void add_tile(const Tile& tile, const Tile* next, int64_t first_position, Rows& rows) const {
    const int key_vectors = (tile.keys + LANES - 1) / LANES;
    for (int r = 0; r < rows.count; r += TILE_ROWS)
      score(std::min(TILE_ROWS, rows.count - r), rows.q + r, tile, r ? nullptr : next, key_vectors,
            rows.scores + r * TILE_KEYS);
    for (int r = 0; r < rows.count; r++) soften(first_position + r / group_ - tile.first, tile, r, rows);
    for (int r = 0; r < rows.count; r += TILE_ROWS)
      weigh(std::min(TILE_ROWS, rows.count - r), rows.scores + r * TILE_KEYS, tile, r ? nullptr : next, rows.decay + r,
            rows.out + r * rows.ld_out, rows.ld_out);
  }

  void locate(const Task& task, int kv_head, int64_t first, int64_t end, Tile& tile, int slot) const {
    tile.first = first;
    tile.keys = static_cast<int>(std::min<int64_t>(end - first, TILE_KEYS));
    const int bs = shape_.block_size;
    const bool whole_vectors = bs % LANES == 0;
    int64_t entry = first / bs, offset = first % bs;
    for (int j = 0; j < tile.keys;) {
      const int64_t block = sequences_.tables[sequences_.table_starts[task.sequence] + entry] * shape_.kv_heads + kv_head;
      const Element* values = values_ + (block * bs + offset) * shape_.v_dim;
      const Element* keys = keys_ + block * shape_.k_dim * bs + offset;
      const int count = static_cast<int>(std::min<int64_t>(bs - offset, tile.keys - j));
      for (int i = 0; i < count; i++) tile.values[j + i] = values + i * shape_.v_dim;
      if constexpr (Kv::SCALED) {
        std::copy_n(cache_.key_scales + block * bs + offset, count, tile.key_scales + j);
        std::copy_n(cache_.value_scales + block * bs + offset, count, tile.value_scales + j);
      }
      if (whole_vectors)
        for (int i = 0; i < count; i += LANES) tile.key_vectors[(j + i) / LANES] = {keys + i, bs};
      j += count;
      entry++;
      offset = 0;
    }
    std::fill(tile.values + tile.keys, tile.values + TILE_KEYS, tile.values[tile.keys - 1]);
    if constexpr (Kv::SCALED) {
      std::fill(tile.key_scales + tile.keys, tile.key_scales + TILE_KEYS, 0.0f);
      std::fill(tile.value_scales + tile.keys, tile.value_scales + TILE_KEYS, 0.0f);
    }
    const int vectors = (tile.keys + LANES - 1) / LANES;
    if (whole_vectors) std::fill(tile.key_vectors + vectors, tile.key_vectors + KEY_VECTORS, tile.key_vectors[vectors - 1]);
    else copy_keys(task, kv_head, tile, slot);
  }

  // For block sizes that are no multiple of sixteen: the same numbers side by side. Of two tiles each has its copy.
  void copy_keys(const Task& task, int kv_head, Tile& tile, int slot) const {
    const int bs = shape_.block_size;
    const size_t size = static_cast<size_t>(shape_.k_dim) * TILE_KEYS;
    Element* copy = scratch<Element>(SLOT_KEYS, 2 * size) + slot * size;
    for (int j = 0; j < (tile.keys + LANES - 1) / LANES * LANES; j++) {
      const int64_t position = tile.first + j;
      const Element* from = nullptr;
      if (j < tile.keys) {
        const int64_t block = sequences_.tables[sequences_.table_starts[task.sequence] + position / bs];
        from = keys_ + (block * shape_.kv_heads + kv_head) * shape_.k_dim * bs + position % bs;
      }
      for (int i = 0; i < shape_.k_dim; i++) copy[i * TILE_KEYS + j] = from ? from[static_cast<int64_t>(i) * bs] : Element{};
    }
    for (int v = 0; v < KEY_VECTORS; v++) tile.key_vectors[v] = {copy + v * LANES, TILE_KEYS};
  }

  void score(int rows, const float* const* q, const Tile& tile, const Tile* next, int key_vectors, float* scores) const {
    with_rows<TILE_ROWS>(rows, [&](auto n) {
      score_rows<Kv, decltype(n)::value>(q, tile.key_vectors, next ? next->key_vectors : nullptr, key_vectors, shape_.k_dim, scores);
    });
  }

  void weigh(int rows, const float* weights, const Tile& tile, const Tile* next, const float* decay, float* out,
             int64_t ld_out) const {
    with_rows<TILE_ROWS>(rows, [&](auto n) {
      value_rows<Kv, decltype(n)::value>(weights, tile.values, next ? next->values : nullptr, tile.keys, shape_.v_dim, decay,
                                     out, ld_out);
    });
  }

  // Scores of a row become weights; `last` is the query's own place counted from the tile's first key.
  void soften(int64_t last, const Tile& tile, int r, Rows& rows) const {
    const int keys = tile.keys;
    float* scores = rows.scores + r * TILE_KEYS;
    const int vectors = (keys + LANES - 1) / LANES;
    const int visible = static_cast<int>(std::min<int64_t>(keys, last + 1));
    const int hidden = options_.window ? static_cast<int>(std::clamp<int64_t>(last + 1 - options_.window, 0, keys)) : 0;
    F16 s[KEY_VECTORS], top = set1(MINUS_INFINITY);
    for (int v = 0; v < vectors; v++) {
      s[v] = load(scores + v * LANES);
      if constexpr (Kv::SCALED) s[v] = mul(s[v], load(tile.key_scales + v * LANES));
      s[v] = mul(s[v], set1(options_.scale));
      if (options_.softcap > 0) s[v] = soft_cap(s[v], options_.softcap);
      s[v] = keep_first(s[v], visible - v * LANES, set1(MINUS_INFINITY));
      if (hidden) s[v] = keep_first(set1(MINUS_INFINITY), hidden - v * LANES, s[v]);
      top = max(top, s[v]);
    }
    const float before = rows.highest[r], now = std::max(before, highest(top));
    const F16 offset = set1(now == MINUS_INFINITY ? 0.0f : now);  // -inf - -inf would be NaN
    F16 total = zero();
    for (int v = 0; v < vectors; v++) {
      F16 p = exp(sub(s[v], offset));
      total = add(total, p);
      if constexpr (Kv::SCALED) p = mul(p, load(tile.value_scales + v * LANES));
      store(scores + v * LANES, p);
    }
    rows.decay[r] = decay(before, now);
    rows.highest[r] = now;
    rows.total[r] = rows.total[r] * rows.decay[r] + sum(total);
  }

  static float decay(float before, float now) {
    if (before == now) return 1.0f;  // which is what exp(0) gives
    float lanes[LANES];
    store(lanes, exp(set1(before - now)));
    return lanes[0];
  }

  void finish(const Task& task, Rows& rows) const {
    const int first_row = static_cast<int>(sequences_.cu[task.sequence]) + task.first;
    for (int r = 0; r < rows.count; r++) {
      const int head = task.kv_head * group_ + r % group_;
      float factor = 1.0f, total = rows.total[r];
      if (options_.sinks) {
        const float now = std::max(rows.highest[r], options_.sinks[head]);
        factor = decay(rows.highest[r], now);
        total = total * factor + decay(options_.sinks[head], now);
      }
      RowSink::Row to = out_.row(first_row + r / group_);
      for (int column = 0; column < shape_.v_dim; column += LANES) {
        const F16 o = mul(load(rows.out + r * rows.ld_out + column), set1(factor));
        to.put(head * shape_.v_dim + column, div(o, set1(total)), std::min(LANES, shape_.v_dim - column));
      }
    }
  }

  const AttentionShape& shape_;
  const AttentionOptions& options_;
  const Sequences& sequences_;
  const float* query_;
  int64_t ld_query_;
  const KvCache& cache_;
  const Element* keys_;
  const Element* values_;
  const RowSink& out_;
  int group_, tokens_per_task_;
};

}  // namespace

void paged_attention(const AttentionShape& shape, const AttentionOptions& options, const Sequences& sequences,
                     const float* query, int64_t ld_query, const KvCache& cache, const RowSink& out) {
  with_kv(cache.type, [&](auto kv) {
    Attention<decltype(kv)>(shape, options, sequences, query, ld_query, cache, out).run();
  });
}

}  // namespace hr

using namespace hr;

HR_EXPORT void hr_paged_attention(const AttentionShape* shape, const AttentionOptions* options,
                                  const Sequences* sequences, const float* query, int64_t ld_query, const KvCache* cache,
                                  float* out, int64_t ld_out) {
  paged_attention(*shape, *options, *sequences, query, ld_query, *cache, RowSink::row_major(out, ld_out));
}
