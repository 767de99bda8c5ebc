// What the launchers of attention share on the host.
#pragma once

#include <type_traits>

#include "common.cuh"

namespace minivllm::cuda::attention {

constexpr int kSmemPerSm = 227 * 1024;
constexpr int kSmemReserved = 1024;  // of each block, by the hardware

// float32, decode and prefill.
void launch_simt_attention(const AttentionParams& p, Stream stream);

// What both launchers refuse.
inline void check_attention(const AttentionParams& p) {
  if (p.kv.num_kv_heads <= 0 || p.num_q_heads % p.kv.num_kv_heads != 0)
    throw std::invalid_argument("attention: " + std::to_string(p.num_q_heads) +
                                " query heads do not share " + std::to_string(p.kv.num_kv_heads) +
                                " KV heads");
  if (!(p.scale > 0.f)) throw std::invalid_argument("attention: scale must be positive");
  constexpr int64_t kMaxRows = int64_t{1} << 32;
  if (p.kv.num_blocks * 2 * p.kv.num_kv_heads * p.kv.block_size > kMaxRows)
    throw std::invalid_argument("attention: the cache has more than 2^32 rows");
}

// Calls f with the head dimension as a compile-time constant.
template <typename F>
void dispatch_head_dim(int64_t head_dim, F&& f) {
  switch (head_dim) {
    case 16:
      return f(std::integral_constant<int, 16>{});
    case 32:
      return f(std::integral_constant<int, 32>{});
    case 64:
      return f(std::integral_constant<int, 64>{});
    case 80:
      return f(std::integral_constant<int, 80>{});
    case 96:
      return f(std::integral_constant<int, 96>{});
    case 128:
      return f(std::integral_constant<int, 128>{});
  }
  throw std::invalid_argument("attention: no 16-bit kernel for head_dim " +
                              std::to_string(head_dim));
}

}  // namespace minivllm::cuda::attention
