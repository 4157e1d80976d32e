// Threads, memory and identity of the library, as Python asks for them.
#include "export.h"
#include "pool.h"
#include "simd.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

HR_EXPORT void hr_set_threads(int32_t threads) { hr::set_thread_count(threads); }
HR_EXPORT int32_t hr_threads() { return hr::thread_count(); }
HR_EXPORT const char* hr_isa() { return hr::ISA; }

// Weights are read front to back once a token: with 4 KiB pages a good part of that is page walks.
HR_EXPORT void hr_use_huge_pages(void* memory, int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t HUGE = 2u << 20;
  uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + HUGE - 1) & ~(HUGE - 1);
  uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + static_cast<uintptr_t>(bytes)) & ~(HUGE - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)memory, (void)bytes;
#endif
}
