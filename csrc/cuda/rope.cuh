// What kernels that rotate queries and keys and find their blocks have in common.
#pragma once

#include "common.cuh"

namespace minivllm::cuda {

// Where the key of a token's head starts in the cache, in elements; -1: it has no block. Values
// lie num_kv_heads heads further.
__device__ __forceinline__ int64_t key_offset(const KvCache& kv, int64_t slot, int64_t position,
                                              int64_t head) {
  if (slot < 0 || position < 0) return -1;
  // Positions are int32, and a division of 64 bits is a hundred instructions.
  const int64_t index = static_cast<uint32_t>(position) / static_cast<uint32_t>(kv.block_size);
  if (index >= kv.max_blocks) return -1;
  const int64_t block = load_settled(kv.block_table + slot * kv.block_table_stride + index);
  if (block < 0 || block >= kv.num_blocks) return -1;
  const int64_t row =
      (block * 2 * kv.num_kv_heads + head) * kv.block_size + (position - index * kv.block_size);
  return row * kv.head_dim;
}

// (a, b) by an angle's cosine and sine. The roundings are spelt out: kernels agree on them.
__device__ __forceinline__ void rotate_pair(float& a, float& b, float cosine, float sine) {
  const float first = __fmaf_rn(a, cosine, -__fmul_rn(b, sine));
  b = __fmaf_rn(b, cosine, __fmul_rn(a, sine));
  a = first;
}

}  // namespace minivllm::cuda
