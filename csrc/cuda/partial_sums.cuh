// The sums that a product left of its chunks of K (LinearParams::partials), added by the kernel
// after it: in order, as the product itself would.
#pragma once

#include "common.cuh"

namespace minivllm::cuda {

// Adds up kSize elements. load(values, part) reads a part's. What is read of kBatch parts is on its
// way before the first addition, as far as there are registers for it: one after the other they
// would take as many round trips to L2, which is most of such a kernel's time. (ptxas keeps to that
// order where the kernel's launch bounds name a number of blocks; else it saves registers.)
template <int kBatch = 4, int kSize, typename Load>
__device__ __forceinline__ void add_parts(float (&sums)[kSize], int64_t num_parts, Load load) {
  const auto add = [&](const float (&values)[kSize], bool is_first) {
#pragma unroll
    for (int i = 0; i < kSize; ++i) sums[i] = is_first ? values[i] : __fadd_rn(sums[i], values[i]);
  };
  int64_t part = 0;
#pragma unroll 1
  for (; part + kBatch <= num_parts; part += kBatch) {
    float values[kBatch][kSize];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) load(values[i], part + i);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) add(values[i], part + i == 0);
  }
#pragma unroll 1
  for (; part < num_parts; ++part) {
    float values[kSize];
    load(values, part);
    add(values, part == 0);
  }
}

// Reads four floats at a multiple of 16 bytes.
__device__ __forceinline__ void load_four(float* values, const float* from) {
  const float4 four = *reinterpret_cast<const float4*>(from);
  values[0] = four.x, values[1] = four.y, values[2] = four.z, values[3] = four.w;
}

}  // namespace minivllm::cuda
