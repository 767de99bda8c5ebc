// out[t] = weight[id]: one block a token copies a row of bytes, in words as wide as the addresses
// and the row's size allow.
#include "embedding.cuh"

namespace minivllm::cuda {
namespace {

constexpr int kMaxThreads = 256;

template <typename Word>
__global__ void __launch_bounds__(kMaxThreads)
    embedding_kernel(EmbeddingParams p, int64_t words_per_row) {
  // In this order, so that all that was in the stream before has ended when any kernel after this
  // one starts: see AttentionParams::settled. At a graph's head it has.
  if (p.first) pdl_launch_dependents();
  pdl_wait();
  pdl_launch_dependents();
  const int64_t token = blockIdx.x;
  const Word* __restrict__ from =
      static_cast<const Word*>(p.weight) + embedding_row(p, token) * words_per_row;
  Word* __restrict__ to = static_cast<Word*>(p.out) + token * words_per_row;
  for (int64_t i = threadIdx.x; i < words_per_row; i += blockDim.x) to[i] = from[i];
}

template <typename Word>
void launch_embedding(const EmbeddingParams& p, int64_t row_bytes, Stream stream) {
  const int64_t words = row_bytes / static_cast<int64_t>(sizeof(Word));
  const int64_t warps = (words + kWarpSize - 1) / kWarpSize;
  const auto threads = static_cast<unsigned>(
      warps * kWarpSize < kMaxThreads ? warps * kWarpSize : int64_t{kMaxThreads});
  MINIVLLM_LAUNCH(embedding_kernel<Word>, dim3(static_cast<unsigned>(p.num_tokens)), dim3(threads),
                  0, stream, p, words);
}

}  // namespace

void embedding(const EmbeddingParams& p, Stream stream) {
  if (p.num_tokens == 0 || p.hidden_size == 0) return;
  dispatch_dtype(p.dtype, [&](auto element) {
    const int64_t row_bytes = p.hidden_size * static_cast<int64_t>(sizeof(element));
    const auto bits = reinterpret_cast<uintptr_t>(p.out) | reinterpret_cast<uintptr_t>(p.weight) |
                      static_cast<uintptr_t>(row_bytes);
    if (bits % sizeof(uint4) == 0) return launch_embedding<uint4>(p, row_bytes, stream);
    if (bits % sizeof(uint32_t) == 0) return launch_embedding<uint32_t>(p, row_bytes, stream);
    launch_embedding<uint16_t>(p, row_bytes, stream);
  });
}

}  // namespace minivllm::cuda
