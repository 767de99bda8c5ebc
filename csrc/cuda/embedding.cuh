// Which row of the table a token is: see EmbeddingParams.
#pragma once

#include "common.cuh"

namespace minivllm::cuda {

// To be called after pdl_wait: the kernel before may have written the ids.
__device__ __forceinline__ int64_t embedding_row(const EmbeddingParams& p, int64_t token) {
  int64_t id = p.token_ids[token];
  if (id < 0 && p.last_tokens != nullptr) {
    const int64_t slot = p.slots[token];
    id = slot < 0 ? 0 : p.last_tokens[slot * p.last_tokens_stride];
  }
  return id < 0 || id >= p.vocab_size ? 0 : id;
}

}  // namespace minivllm::cuda
