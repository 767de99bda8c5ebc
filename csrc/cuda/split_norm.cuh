// An RMSNorm (https://arxiv.org/abs/1910.07467) in two halves, one in each of the products that it
// lies between: see kNormColumns in kernels.h. What is here fixes the order of additions, which
// does not depend on how many rows there are or on who holds them.
#pragma once

#include "common.cuh"

namespace minivllm::cuda::split_norm {

constexpr int kQuad = 4;  // lanes

__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(kFullMask, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(kFullMask, x, 2));
}

// A square sum: lane q of a quad holds columns 8 i + 2 q and the one after, for i < 8. Pairs first,
// then over i by halves, then over the quad.
__device__ __forceinline__ float pair_square(float x, float y) {
  return __fmaf_rn(y, y, __fmul_rn(x, x));
}
__device__ __forceinline__ float add_pairs(const float (&pairs)[8]) {
  const float low = __fadd_rn(__fadd_rn(pairs[0], pairs[1]), __fadd_rn(pairs[2], pairs[3]));
  const float high = __fadd_rn(__fadd_rn(pairs[4], pairs[5]), __fadd_rn(pairs[6], pairs[7]));
  return __fadd_rn(low, high);
}

// A row's square sums on their way: lane q of a quad has those of index q, q + 4, ... All lanes of
// the quad have the same row.
struct RowSums {
  static constexpr int kHeld = 8;  // in registers; further ones are read when they are added
  const float* square_sums;
  int given;  // that are read: none of a row that does not exist
  float held[kHeld];

  __device__ __forceinline__ RowSums() {}
  __device__ __forceinline__ RowSums(const float* row, int count, int lane)
      : square_sums(row), given(count) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int index = lane % kQuad + kQuad * i;
      held[i] = index < given ? row[index] : 0.0f;
    }
  }
  // 1 / rms of the row; the same bits in all lanes of the quad.
  __device__ __forceinline__ float scale(int count, float eps, int lane) const {
    float sum = held[0];
#pragma unroll
    for (int i = 1; i < kHeld; ++i) sum = __fadd_rn(sum, held[i]);
#pragma unroll 1
    for (int i = lane % kQuad + kQuad * kHeld; i < given; i += kQuad)
      sum = __fadd_rn(sum, square_sums[i]);
    const float size = static_cast<float>(count * static_cast<int>(kNormColumns));
    return rsqrtf(__fadd_rn(__fdiv_rn(quad_sum(sum), size), eps));
  }
};

}  // namespace minivllm::cuda::split_norm
