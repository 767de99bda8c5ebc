// Keeps the per-slot rows on the device: scattered words of state, and the counts that penalties
// read. One thread a pair, or a token; integer atomics, so that repeated tokens add up. And moves a
// step's words from and to the host: threads do a few KB sooner than the copy engine, which waits
// for the kernel before and is waited for by the next.
#include "../sampling_math.h"
#include "common.cuh"

namespace minivllm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kCountThreads = 1024;

__global__ void __launch_bounds__(kThreads) update_state_kernel(UpdateStateParams p) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= p.num_pairs) return;
  const int32_t index = p.pairs[2 * i];
  if (index >= 0 && index < p.size) p.state[index] = p.pairs[2 * i + 1];
}

// num_words 4-byte words, all but the last few by fours.
__global__ void __launch_bounds__(kThreads) copy_words_kernel(CopyWordsParams p, int64_t fours) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < fours) {
    reinterpret_cast<int4*>(p.to)[i] = __ldcv(reinterpret_cast<const int4*>(p.from) + i);
  } else if (const int64_t word = 4 * fours + i - fours; word < p.num_words) {
    p.to[word] = __ldcv(p.from + word);
  }
}

// One block: the row is cleared before any token is marked. It runs once a request.
__global__ void __launch_bounds__(kCountThreads) count_tokens_kernel(CountTokensParams p) {
  pdl_launch_dependents();
  pdl_wait();
  for (int64_t id = threadIdx.x; id < p.vocab_size; id += kCountThreads) p.counts[id] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < p.num_tokens; i += kCountThreads) {
    const int32_t id = p.token_ids[i];
    if (id < 0 || id >= p.vocab_size) continue;
    if (i < p.num_prompt_tokens) {
      atomicOr(&p.counts[id], sampling::kPromptBit);
    } else {
      atomicAdd(&p.counts[id], 1);
    }
  }
}

}  // namespace

void update_state(const UpdateStateParams& p, Stream stream) {
  if (p.num_pairs == 0) return;
  const auto blocks = static_cast<unsigned>((p.num_pairs + kThreads - 1) / kThreads);
  MINIVLLM_LAUNCH(update_state_kernel, dim3(blocks), dim3(kThreads), 0, stream, p);
}

void copy_words(const CopyWordsParams& p, Stream stream) {
  if (p.num_words == 0) return;
  const auto addresses = reinterpret_cast<uintptr_t>(p.to) | reinterpret_cast<uintptr_t>(p.from);
  const int64_t fours = addresses % sizeof(int4) == 0 ? p.num_words / 4 : 0;
  const int64_t threads = p.num_words - 3 * fours;
  const auto blocks = static_cast<unsigned>((threads + kThreads - 1) / kThreads);
  MINIVLLM_LAUNCH(copy_words_kernel, dim3(blocks), dim3(kThreads), 0, stream, p, fours);
}

void count_tokens(const CountTokensParams& p, Stream stream) {
  MINIVLLM_LAUNCH(count_tokens_kernel, dim3(1), dim3(kCountThreads), 0, stream, p);
}

}  // namespace minivllm::cuda
