// A small thread pool: tiles are taken one by one by whoever is free, and nobody waits for a thread that has none.
#ifndef HEADRACE_POOL_H
#define HEADRACE_POOL_H

#include <cstddef>
#include <type_traits>

namespace hr {

using Tile = void (*)(void* context, int index);

// Calls tile(context, 0) … tile(context, count - 1) on the pool's threads and the caller's; returns when all are done.
void run_tiles(int count, Tile tile, void* context);

int thread_count();
void set_thread_count(int threads);

template <class F>
void parallel(int count, F&& body) {
  using Body = std::remove_reference_t<F>;
  run_tiles(count, [](void* context, int index) { (*static_cast<Body*>(context))(index); }, &body);
}

// For rows whose work is about a microsecond: a few are done at once by the caller, more in handfuls.
template <class F>
void parallel_rows(int rows, F&& body) {
  constexpr int SERIAL = 4, HANDFUL = 4;
  if (rows <= SERIAL) {
    for (int r = 0; r < rows; r++) body(r);
    return;
  }
  parallel((rows + HANDFUL - 1) / HANDFUL, [&](int i) {
    for (int r = i * HANDFUL; r < rows && r < (i + 1) * HANDFUL; r++) body(r);
  });
}

// Memory of the calling thread, aligned to a cache line, that lasts until its next request in the same slot.
void* thread_scratch(int slot, size_t bytes);
template <class T>
T* scratch(int slot, size_t count) {
  return static_cast<T*>(thread_scratch(slot, count * sizeof(T)));
}

}  // namespace hr

#endif
