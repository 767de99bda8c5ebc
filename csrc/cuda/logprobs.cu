// Log probabilities of the raw logits: log_softmax at one token, its rank, and the likeliest
// tokens.
//
// One block a row, two passes over it:
//   1. each thread finds the likeliest of its tokens; the top_n-th of those is a bound that at
//      least top_n tokens of the row reach, and seldom many more;
//   2. the sum of exponentials, the rank, and a list of the tokens that reach the bound.
// A token's place in the list's order is the number of tokens before it: no sort. Rows that list
// too many have the exact bound searched for (select.cuh). A sum's tree depends on the vocabulary
// alone.
#include "common.cuh"
#include "select.cuh"

namespace minivllm::cuda {
namespace {

using sampling::kEverything;
using sampling::kQuad;
using sampling::order_of;

constexpr int kThreads = 1024;
constexpr int kNumWarps = kThreads / kWarpSize;
constexpr int kUnroll = 4;
constexpr int kMaxListed = 2048;

struct Shared {
  Histogram histogram;
  uint64_t listed[kMaxListed];
  int num_listed;
  float warp_sums[kNumWarps];
  uint64_t warp_firsts[kNumWarps];
};

// f(logit, id) for this thread's share of a row, in rising order.
template <bool kAligned, typename F>
__device__ void for_each_logit(const float* logits, int32_t vocab_size, F f) {
#pragma unroll 1
  for (int32_t start = 0; start < vocab_size; start += kThreads * kUnroll * kQuad) {
    float values[kUnroll][kQuad];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t id = start + (u * kThreads + static_cast<int32_t>(threadIdx.x)) * kQuad;
      if (kAligned && id + kQuad <= vocab_size) {
        const float4 v = __ldcg(reinterpret_cast<const float4*>(logits + id));
        values[u][0] = v.x, values[u][1] = v.y, values[u][2] = v.z, values[u][3] = v.w;
      } else {
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          values[u][i] = id + i < vocab_size ? __ldcg(logits + id + i) : 0.0f;
        }
      }
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int32_t id = start + (u * kThreads + static_cast<int32_t>(threadIdx.x)) * kQuad;
#pragma unroll
      for (int i = 0; i < kQuad; ++i) {
        if (id + i < vocab_size) f(values[u][i], id + i);
      }
    }
  }
}

// Both reductions are a butterfly in the warp, then another over the warps; all threads get them.
__device__ float block_sum(float x, Shared& shared) {
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) shared.warp_sums[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  return warp_sum(shared.warp_sums[threadIdx.x % kWarpSize]);
}

__device__ uint64_t warp_first(uint64_t word) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(kFullMask, word, offset);
    word = other < word ? other : word;
  }
  return word;
}

__device__ uint64_t block_first(uint64_t word, Shared& shared) {
  word = warp_first(word);
  __syncthreads();
  if (threadIdx.x % kWarpSize == 0) shared.warp_firsts[threadIdx.x / kWarpSize] = word;
  __syncthreads();
  return warp_first(shared.warp_firsts[threadIdx.x % kWarpSize]);
}

template <bool kAligned>
__global__ void __launch_bounds__(kThreads, 1) logprobs_kernel(LogprobsParams p) {
  static_assert(kNumWarps == kWarpSize);
  __shared__ Shared shared;
  pdl_launch_dependents();
  pdl_wait();
  const int64_t row = blockIdx.x;
  const float* logits = p.logits + row * p.logits_stride;
  const auto vocab_size = static_cast<int32_t>(p.vocab_size);
  const auto top_n = static_cast<uint64_t>(p.top_n < p.vocab_size ? p.top_n : p.vocab_size);
  const int32_t token = p.tokens[row];
  const bool has_token = token >= 0 && token < vocab_size;

  uint64_t first = kEverything;
  for_each_logit<kAligned>(logits, vocab_size, [&](float logit, int32_t id) {
    const uint64_t word = order_of(logit, id);
    first = word < first ? word : first;
  });
  const float peak = logits[static_cast<uint32_t>(block_first(first, shared))];
  uint64_t bound = 0;  // below every word
  if (top_n > 0) {
    bound = last_wanted<kThreads>(shared.histogram, top_n, [&](auto add) {
      if (first != kEverything) add(first, uint64_t{1});
    });
  }

  const uint64_t token_word = has_token ? order_of(logits[token], token) : 0;
  const auto list = [&](uint64_t word) {
    if (word > bound) return;
    const int place = atomicAdd(&shared.num_listed, 1);
    if (place < kMaxListed) shared.listed[place] = word;
  };
  if (threadIdx.x == 0) shared.num_listed = 0;
  __syncthreads();
  float sum = 0.0f;
  int before = 0;
  for_each_logit<kAligned>(logits, vocab_size, [&](float logit, int32_t id) {
    const uint64_t word = order_of(logit, id);
    sum += expf(logit - peak);
    before += word < token_word;
    list(word);
  });
  const float log_sum = logf(block_sum(sum, shared));
  // Counts below 2^24 are exact as floats.
  const float rank = 1.0f + block_sum(static_cast<float>(before), shared);
  if (threadIdx.x == 0) {
    p.logprobs[row] = has_token ? (logits[token] - peak) - log_sum : NAN;
    p.ranks[row] = has_token ? static_cast<int32_t>(rank) : 0;
  }
  if (p.top_n == 0) return;

  if (shared.num_listed > kMaxListed) {
    bound = last_wanted<kThreads>(shared.histogram, top_n, [&](auto add) {
      for_each_logit<kAligned>(logits, vocab_size, [&](float logit, int32_t id) {
        add(order_of(logit, id), uint64_t{1});
      });
    });
    __syncthreads();
    if (threadIdx.x == 0) shared.num_listed = 0;
    __syncthreads();
    for_each_logit<kAligned>(logits, vocab_size,
                             [&](float logit, int32_t id) { list(order_of(logit, id)); });
    __syncthreads();
  }
  int32_t* top_ids = p.top_ids + row * p.top_n;
  float* top_logprobs = p.top_logprobs + row * p.top_n;
  for (int i = threadIdx.x; i < shared.num_listed; i += kThreads) {
    const uint64_t word = shared.listed[i];
    int64_t place = 0;
    for (int other = 0; other < shared.num_listed; ++other) place += shared.listed[other] < word;
    if (place >= p.top_n) continue;
    const auto id = static_cast<uint32_t>(word);
    top_ids[place] = static_cast<int32_t>(id);
    top_logprobs[place] = (logits[id] - peak) - log_sum;
  }
  for (int64_t place = top_n + threadIdx.x; place < p.top_n; place += kThreads) {
    top_ids[place] = -1;
    top_logprobs[place] = -INFINITY;
  }
}

}  // namespace

void logprobs(const LogprobsParams& p, Stream stream) {
  if (p.num_rows == 0) return;
  if (p.vocab_size < 1 || p.vocab_size > sampling::kMaxVocabSize) {
    throw std::invalid_argument("logprobs: vocab_size " + std::to_string(p.vocab_size) +
                                " is not in [1, " + std::to_string(sampling::kMaxVocabSize) + "]");
  }
  if (p.top_n < 0 || p.top_n > kMaxListed) {
    throw std::invalid_argument("logprobs: top_n " + std::to_string(p.top_n) + " is not in [0, " +
                                std::to_string(kMaxListed) + "]");
  }
  const bool aligned =
      reinterpret_cast<uintptr_t>(p.logits) % sizeof(float4) == 0 && p.logits_stride % kQuad == 0;
  const auto kernel = aligned ? logprobs_kernel<true> : logprobs_kernel<false>;
  MINIVLLM_LAUNCH(kernel, dim3(static_cast<unsigned>(p.num_rows)), dim3(kThreads), 0, stream, p);
}

}  // namespace minivllm::cuda
