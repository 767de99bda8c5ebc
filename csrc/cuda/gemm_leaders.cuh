// Of logits the largest among 64 neighbouring columns of a row: see LeadersTo. A draw of the
// likeliest token then reads 8 bytes for each, and where all rows draw so, the logits are not even
// written.
#pragma once

#include "../sampling_math.h"
#include "gemm_copy.cuh"

namespace minivllm::cuda::gemm {

// Whether logits are wanted of any of a warpgroup's rows. All lanes of a warp call it.
__device__ __forceinline__ bool wants_logits(const Output& o, int first_token, int lane) {
  bool wanted = false;
  for (int row = lane; row < kTileTokens; row += kWarpSize) {
    if (first_token + row >= o.num_tokens) break;
    const int slot = o.leaders.slots[first_token + row];
    if (slot < 0) continue;
    wanted |= !(o.leaders.state[slot * o.leaders.state_stride + kFlags] & kLeaderSuffices);
  }
  return __any_sync(kFullMask, wanted);
}

template <int kN>
__device__ __forceinline__ void store_leaders(const float (&acc)[kN / 2], const Output& o,
                                              const Place& at) {
  constexpr int kColumns = static_cast<int>(kLeaderColumns);
  const int64_t count = sampling::num_leaders(o.n);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t token = at.token + at.row() + 8 * h;
#pragma unroll
    for (int g = 0; g < kN / kColumns; ++g) {
      const float* y = acc + g * (kColumns / 2) + 2 * h;
      const int index = at.column / kColumns + g;
      const int first = index * kColumns + 2 * (at.lane % 4);
      float largest = -INFINITY;
      int column = first;
      bool has_nan = false;
#pragma unroll
      for (int i = 0; i < kColumns / 8; ++i) {
        if (first + 8 * i >= o.n) break;
#pragma unroll
        for (int j = 0; j < 2; ++j) {  // by rising columns: the first of equal ones stays
          const float value = y[4 * i + j];
          has_nan |= value != value;
          if (value > largest) largest = value, column = first + 8 * i + j;
        }
      }
      uint64_t leader = has_nan ? 0 : sampling::order_of(largest, column);
#pragma unroll
      for (int offset = 1; offset < 4; offset *= 2)
        leader = min(leader, __shfl_xor_sync(kFullMask, leader, offset));
      if (at.lane % 4 == 0 && token < o.num_tokens && index < count)
        o.leaders.leaders[token * count + index] = leader;
    }
  }
}

}  // namespace minivllm::cuda::gemm
