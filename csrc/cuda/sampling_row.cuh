// What the sampling kernel's passes share: a row's logits as its slot adjusts them, the best token
// of a block, and scores. sampling.cu says how they fit together.
#pragma once

#include "common.cuh"
#include "select.cuh"

namespace minivllm::cuda::draws {

using sampling::Adjustments;
using sampling::Best;
using sampling::kQuad;
using sampling::Settings;

constexpr int kThreads = 512;
constexpr int kUnroll = 4;         // quads a thread has in flight
constexpr int kMaxListed = 2816;   // candidates in shared memory
constexpr int kFilterWords = 512;  // 16384 bits: which ids may have a bias

struct alignas(16) Partial {
  double score;
  int32_t id;
  int32_t has_nan;
};

struct Shared {
  Histogram histogram;
  float listed_logits[kMaxListed];
  int32_t listed_ids[kMaxListed];
  int num_listed;
  Partial warp_partials[kThreads / kWarpSize];
  uint64_t warp_leaders[kThreads / kWarpSize];
  bool is_last;
};

// Reads one row's adjusted logits, by quads of tokens.
template <bool kAligned>
struct Row {
  const float* logits;
  int32_t vocab_size, position;
  Settings settings;
  Adjustments adjustments;
  bool adjusted;
  uint32_t bias_filter[kFilterWords];

  // Called by all threads of the block. The row lies in shared memory: registers are for logits.
  __device__ void open(const SampleParams& p, int64_t index, int32_t slot) {
    if (threadIdx.x == 0) {
      logits = p.logits + index * p.logits_stride;
      vocab_size = static_cast<int32_t>(p.vocab_size);
      position = p.positions[index];
      settings = sampling::read_settings(p.state + int64_t{slot} * p.state_stride);
      adjustments = sampling::read_adjustments(p, settings, slot, position);
      adjusted = adjustments.any();
    }
    __syncthreads();
    if (adjustments.num_bias == 0) return;
    for (int i = threadIdx.x; i < kFilterWords; i += kThreads) bias_filter[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < adjustments.num_bias; i += kThreads) {
      if (position >= adjustments.bias_until[i]) continue;
      const auto id = static_cast<uint32_t>(adjustments.bias_ids[i]);
      atomicOr(&bias_filter[id / 32 % kFilterWords], 1u << (id % 32));
    }
    __syncthreads();
  }

  __device__ float adjust(float logit, int32_t id) const {
    if (adjustments.num_bias > 0 && (bias_filter[id / 32 % kFilterWords] >> (id % 32)) & 1u) {
      logit = adjustments.biased(logit, id);
    }
    return adjustments.counts != nullptr ? adjustments.penalised(logit, id, settings) : logit;
  }

  // Past the vocabulary a logit is -inf, which is never drawn. L1 is passed by: the logits are new.
  __device__ void load(int32_t quad, float (&values)[kQuad]) const {
    const int32_t id = quad * kQuad;
    if (kAligned && id + kQuad <= vocab_size) {
      const float4 v = __ldcg(reinterpret_cast<const float4*>(logits) + quad);
      values[0] = v.x, values[1] = v.y, values[2] = v.z, values[3] = v.w;
      return;
    }
#pragma unroll
    for (int i = 0; i < kQuad; ++i) {
      values[i] = id + i < vocab_size ? __ldcg(logits + id + i) : -INFINITY;
    }
  }

  // Rare, so it is small instead: one copy of the code, the values passing through its turns.
  __device__ void adjust_quad(int32_t quad, float (&values)[kQuad]) const {
#pragma unroll 1
    for (int i = 0; i < kQuad; ++i) {
      const int32_t id = quad * kQuad + i;
      const float value = id < vocab_size ? adjust(values[0], id) : values[0];
      values[0] = values[1], values[1] = values[2], values[2] = values[3], values[3] = value;
    }
  }

  // f(quad, values) for this thread's quads of [begin, end), in rising order; each_batch() after
  // every kUnroll of them.
  template <typename F, typename G>
  __device__ void for_each_quad(int32_t begin, int32_t end, F f, G each_batch) const {
#pragma unroll 1
    for (int32_t start = begin; start < end; start += kThreads * kUnroll) {
      float values[kUnroll][kQuad];
      const int32_t mine = start + static_cast<int32_t>(threadIdx.x);
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int32_t quad = mine + u * kThreads;
        if (quad < end) load(quad, values[u]);
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const int32_t quad = mine + u * kThreads;
        if (quad >= end) continue;
        if (adjusted) adjust_quad(quad, values[u]);
        f(quad, values[u]);
      }
      each_batch();
    }
  }
};

// The best of the block and whether it saw a NaN. All threads get it.
__device__ inline Partial reduce_block(Best best, bool has_nan, Shared& shared) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
    best.take(__shfl_xor_sync(kFullMask, best.score, offset),
              __shfl_xor_sync(kFullMask, best.id, offset));
  }
  const int any_nan = __syncthreads_or(has_nan);
  if (threadIdx.x % kWarpSize == 0) {
    shared.warp_partials[threadIdx.x / kWarpSize] = {best.score, best.id, any_nan};
  }
  __syncthreads();
  Best merged;
  for (int i = 0; i < kThreads / kWarpSize; ++i) {
    merged.take(shared.warp_partials[i].score, shared.warp_partials[i].id);
  }
  __syncthreads();
  return {merged.score, merged.id, any_nan};
}

// Scores tokens, most of them only roughly: the noise is at most -log(u + u^2 / 2), for which one
// approximate logarithm does, and few tokens of a row can still be the best one.
struct Scorer {
  const double inverse_temperature;
  Best best;
  float to_beat = -INFINITY;  // a lower bound of the best score, this thread's or another's

  __device__ explicit Scorer(const Settings& settings)
      : inverse_temperature(1.0 / static_cast<double>(settings.temperature)) {}

  __device__ void take(float logit, int32_t id, uint32_t word) {
    const float u = sampling::uniform_of(word);
    const float scaled = logit * static_cast<float>(inverse_temperature);
    const float bound = scaled - __logf(fmaf(0.5f * u, u, u));
    if (bound + fmaf(fabsf(scaled), 1e-6f, 1e-4f) < to_beat) return;
    best.take(sampling::score_of(logit, inverse_temperature, word), id);
    to_beat = fmaxf(to_beat, __double2float_rd(best.score));
  }

  // Lets the lanes of a warp know of each other's best.
  __device__ void share() {
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2) {
      to_beat = fmaxf(to_beat, __shfl_xor_sync(kFullMask, to_beat, offset));
    }
  }
};

}  // namespace minivllm::cuda::draws
