// Finds how far a set of tokens reaches, in the order of sampling::order_of, until its amounts
// (a count, or integer weights) add up to a target: histograms over digits of that order, by a
// whole block, without a sort. All sums are integers, so that no order of additions matters.
#pragma once

#include "../sampling_math.h"
#include "common.cuh"

namespace minivllm::cuda {

constexpr int kBins = sampling::kDistanceBins;
constexpr int kMaxWarps = 32;

struct Crossing {
  int bin;           // -1: the target is never reached
  uint64_t missing;  // what it must give beside the bins before it
  uint64_t inside;   // what it holds
};

// In shared memory. Amounts of 64 bits are kept as two words, because shared memory adds words
// natively but long words in a loop.
struct Histogram {
  uint32_t low[kBins];
  uint32_t high[kBins];
  uint64_t warp_totals[kMaxWarps];
  Crossing crossing;

  __device__ void clear() {
    __syncthreads();
    for (int bin = threadIdx.x; bin < kBins; bin += blockDim.x) low[bin] = high[bin] = 0;
    __syncthreads();
  }

  __device__ void add(int bin, uint64_t amount) {
    const auto amount_low = static_cast<uint32_t>(amount);
    const uint32_t old = atomicAdd(&low[bin], amount_low);
    const uint32_t carried = static_cast<uint32_t>(amount >> 32) + (old + amount_low < old);
    if (carried != 0) atomicAdd(&high[bin], carried);
  }

  __device__ uint64_t at(int bin) const {
    return (static_cast<uint64_t>(high[bin]) << 32) | low[bin];
  }

  // The first bin at which the sum reaches target(total). Called by all threads, after the adds.
  template <int kThreads, typename Target>
  __device__ Crossing find(Target target) {
    static_assert(kBins % kThreads == 0);
    constexpr int kBinsPerThread = kBins / kThreads;
    const int lane = threadIdx.x % kWarpSize;
    const int warp = threadIdx.x / kWarpSize;
    const int first = threadIdx.x * kBinsPerThread;
    __syncthreads();
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kBinsPerThread; ++i) sum += at(first + i);
    uint64_t through = sum;  // up to the end of this thread's bins
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const uint64_t other = __shfl_up_sync(kFullMask, through, offset);
      if (lane >= offset) through += other;
    }
    if (lane == kWarpSize - 1) warp_totals[warp] = through;
    if (threadIdx.x == 0) crossing = {-1, 0, 0};
    __syncthreads();
    uint64_t total = 0;
    for (int i = 0; i < kThreads / kWarpSize; ++i) {
      if (i == warp) through += total;
      total += warp_totals[i];
    }
    const uint64_t goal = target(total);
    uint64_t before = through - sum;
    if (before < goal && goal <= through) {
      int bin = first;
      while (before + at(bin) < goal) before += at(bin++);
      crossing = {bin, goal - before, at(bin)};
    }
    __syncthreads();
    return crossing;
  }
};

// The last word, in the order, of the shortest run of words whose amounts reach `missing`.
// for_each(f) calls f(word, amount) for this thread's share of the words; each word occurs once.
// It stops early where all of a digit's words are wanted.
template <int kThreads, typename ForEach>
__device__ uint64_t last_wanted(Histogram& histogram, uint64_t missing, ForEach for_each) {
  constexpr int kDigitBits = 11;
  constexpr int kWordBits = 64;
  static_assert(1 << kDigitBits == kBins);
  uint64_t prefix = 0;
  uint64_t known = 0;  // mask of the digits that prefix holds
  int shift = kWordBits;
#pragma unroll 1
  while (shift > 0) {
    shift = shift > kDigitBits ? shift - kDigitBits : 0;
    histogram.clear();
    for_each([&](uint64_t word, uint64_t amount) {
      if ((word & known) != prefix || amount == 0) return;
      // The last digit overlaps the one before: those bits are equal in all that is left.
      histogram.add(static_cast<int>((word >> shift) & (kBins - 1)), amount);
    });
    const Crossing crossing = histogram.find<kThreads>([&](uint64_t) { return missing; });
    if (crossing.bin < 0) return sampling::kEverything;
    known = sampling::kEverything << shift;
    prefix =
        (prefix & ~(uint64_t{kBins - 1} << shift)) | (static_cast<uint64_t>(crossing.bin) << shift);
    missing = crossing.missing;
    if (missing == crossing.inside) break;
  }
  return prefix | ~known;
}

}  // namespace minivllm::cuda
