#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <pthread.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hr {
namespace {

// Long enough to bridge the gap between two products of a step, short enough to give a contended core away:
// a thread that spins while another process wants its core slows down the very thread it waits for.
constexpr auto SPIN = std::chrono::microseconds(40);
constexpr int PAUSES_PER_LOOK = 16;

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#else
  std::this_thread::yield();
#endif
}

template <class Ready>
bool spin_until(Ready ready) {
  if (ready()) return true;
  auto end = std::chrono::steady_clock::now() + SPIN;
  do {
    for (int i = 0; i < PAUSES_PER_LOOK; i++) {
      pause();
      if (ready()) return true;
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

// A thread's share of a round in one word, so that one atomic addition takes a tile and tells whether there was one.
// next: bits 0-23, end: bits 24-47, round: bits 48-63.
constexpr uint64_t FIELD = (1u << 24) - 1;
uint64_t next_of(uint64_t s) { return s & FIELD; }
uint64_t end_of(uint64_t s) { return (s >> 24) & FIELD; }
bool exhausted(uint64_t s) { return next_of(s) >= end_of(s); }

struct alignas(64) Share {
  std::atomic<uint64_t> state{0};
};

// Each thread takes the tiles of its own share in order, then those that others have not begun: neighbouring tiles share
// memory that was fetched ahead, and a thread whose core is taken away holds up no more than the tile it is at.
class Pool {
 public:
  explicit Pool(int threads) : threads_(threads), shares_(new Share[threads]) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  void run(int count, Tile tile, void* context) {
    tile_ = tile;
    context_ = context;
    count_ = count;
    done_.store(0, std::memory_order_relaxed);
    round_++;
    for (int i = 0; i < threads_; i++) {
      const uint64_t next = static_cast<int64_t>(count) * i / threads_, end = static_cast<int64_t>(count) * (i + 1) / threads_;
      // Sequentially consistent, as is the sleeper's check: one of the two sees the other.
      shares_[i].state.store((round_ << 48) | (end << 24) | next);
    }
    if (sleepers_.load() > 0) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      wake_.notify_all();
    }
    take_tiles(0);
    auto all_done = [&] { return done_.load(std::memory_order_acquire) == count; };
    if (spin_until(all_done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    caller_waits_.store(true);
    finished_.wait(lock, [&] { return done_.load() == count; });
    caller_waits_.store(false);
  }

 private:
  void take_tiles(int thread) {
    for (int i = 0; i < threads_; i++) take_share(shares_[(thread + i) % threads_]);
  }

  // Tiles are counted here and added to done_ together: a line that all cores write at each tile takes up to a tenth of a step.
  void take_share(Share& share) {
    int tiles = 0, count = 0;
    while (!exhausted(share.state.load(std::memory_order_acquire))) {
      const uint64_t ticket = share.state.fetch_add(1, std::memory_order_acq_rel);
      if (exhausted(ticket)) break;
      // A valid ticket keeps its round open until the addition: the caller's fields stay as they are.
      count = count_;
      tile_(context_, static_cast<int>(next_of(ticket)));
      tiles++;
    }
    if (tiles > 0 && done_.fetch_add(tiles) + tiles == count && caller_waits_.load()) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      finished_.notify_one();
    }
  }

  bool has_work() const {
    if (stop_.load()) return true;
    for (int i = 0; i < threads_; i++)
      if (!exhausted(shares_[i].state.load())) return true;
    return false;
  }

  void work(int thread) {
    while (!stop_.load()) {
      if (spin_until([&] { return has_work(); })) {
        take_tiles(thread);
        continue;
      }
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [&] { return has_work(); });
      sleepers_.fetch_sub(1);
    }
  }

  const int threads_;
  std::unique_ptr<Share[]> shares_;
  alignas(64) std::atomic<int> done_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::atomic<bool> stop_{false}, caller_waits_{false};
  Tile tile_ = nullptr;
  void* context_ = nullptr;
  int count_ = 0;
  uint64_t round_ = 0;
  std::mutex mutex_;
  std::condition_variable wake_, finished_;
  std::vector<std::thread> workers_;
};

struct Shared {
  std::mutex mutex;  // one caller at a time: two engines in one process take turns
  Pool* pool = nullptr;
  int threads = 1;
};

Shared& shared() {
  static Shared* instance = [] {
    auto* s = new Shared;
    // A child of fork has none of the parent's threads: it starts its own pool when it needs one.
    pthread_atfork(nullptr, nullptr, [] {
      Shared& inherited = shared();
      int threads = inherited.threads;
      new (&inherited) Shared;
      inherited.threads = threads;
    });
    return s;
  }();
  return *instance;
}

struct Scratch {
  static constexpr int SLOTS = 12;
  void* memory[SLOTS] = {};
  size_t size[SLOTS] = {};
  ~Scratch() {
    for (void* p : memory) std::free(p);
  }
};

}  // namespace

void run_tiles(int count, Tile tile, void* context) {
  Shared& s = shared();
  if (count <= 1 || s.threads <= 1) {
    for (int i = 0; i < count; i++) tile(context, i);
    return;
  }
  std::lock_guard<std::mutex> lock(s.mutex);
  if (!s.pool) s.pool = new Pool(s.threads);
  s.pool->run(count, tile, context);
}

int thread_count() { return shared().threads; }

void set_thread_count(int threads) {
  Shared& s = shared();
  std::lock_guard<std::mutex> lock(s.mutex);
  s.threads = threads < 1 ? 1 : threads;
  if (s.pool && s.pool->threads() != s.threads) {
    delete s.pool;
    s.pool = nullptr;
  }
}

void* thread_scratch(int slot, size_t bytes) {
  static thread_local Scratch scratch;
  if (scratch.size[slot] < bytes) {
    std::free(scratch.memory[slot]);
    size_t rounded = (bytes + 4095) & ~static_cast<size_t>(4095);
    scratch.memory[slot] = std::aligned_alloc(64, rounded);
    scratch.size[slot] = rounded;
  }
  return scratch.memory[slot];
}

}  // namespace hr
