// out[t] = weight[token]: copies, so that no instruction set matters.
#include "parallel.h"
#include "types.h"

namespace minivllm::cpu {

void embedding(const EmbeddingParams& p) {
  const size_t row_bytes =
      static_cast<size_t>(p.hidden_size) * (p.dtype == DType::kFloat32 ? 4 : 2);
  parallel_for(p.num_tokens, 64, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      int64_t id = p.token_ids[t];
      if (id < 0 && p.last_tokens != nullptr && p.slots[t] >= 0) {
        id = p.last_tokens[p.slots[t] * p.last_tokens_stride];
      }
      if (id < 0 || id >= p.vocab_size) id = 0;
      std::memcpy(static_cast<char*>(p.out) + static_cast<size_t>(t) * row_bytes,
                  static_cast<const char*>(p.weight) + static_cast<size_t>(id) * row_bytes,
                  row_bytes);
    }
  });
}

}  // namespace minivllm::cpu
