#include <cstdint>
#include <cstring>

#include "../native/export.h"
#include "../native/pool.h"

// memory[destination] = memory[source] for each pair of blocks, in all `tensors` caches. No block may be both source
// and destination.
HR_EXPORT void hr_copy_blocks(uint8_t* const* caches, const int64_t* block_bytes, int32_t tensors, const int64_t* pairs,
                              int32_t count) {
  hr::parallel(tensors, [&](int t) {
    for (int i = 0; i < count; i++)
      std::memcpy(caches[t] + pairs[2 * i + 1] * block_bytes[t], caches[t] + pairs[2 * i] * block_bytes[t],
                  static_cast<size_t>(block_bytes[t]));
  });
}
