// Threads for the CPU launchers. Defined in bindings.cpp over torch's pool, so that the engine and
// torch never compete with two pools.
#pragma once

#include <atomic>
#include <cstdint>
#include <type_traits>

namespace minivllm::cpu {

using RangeFunction = void (*)(void* context, int64_t begin, int64_t end);

// Calls function on disjoint half-open ranges that cover [0, n), none (but the last) shorter than
// grain. An exception in a range is rethrown here.
void parallel_ranges(int64_t n, int64_t grain, RangeFunction function, void* context);

template <class F>
void parallel_for(int64_t n, int64_t grain, F&& f) {
  parallel_ranges(
      n, grain,
      [](void* context, int64_t begin, int64_t end) {
        (*static_cast<std::remove_reference_t<F>*>(context))(begin, end);
      },
      const_cast<void*>(static_cast<const void*>(&f)));
}

// f(i) for each i in [0, n), each taken by the next free thread: for items of unequal length. Many
// threads take part only where wide.
template <class F>
void parallel_items(int64_t n, bool wide, F&& f) {
  std::atomic<int64_t> next{0};
  parallel_for(n, wide ? 1 : n, [&](int64_t, int64_t) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) f(i);
  });
}

}  // namespace minivllm::cpu
