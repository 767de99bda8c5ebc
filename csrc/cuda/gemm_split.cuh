// A matrix product whose warps share K: what float32 and few tokens have in common on every card.
//
// K is cut into parts of equal length, one for each warp of a CTA, and each warp multiplies the
// CTA's whole tile over its own. It brings its part of the tokens and of the weight's rows through
// a ring of its own in shared memory, without waiting for other warps. At the end the parts' sums
// of an output are added in order. How a warp adds within its part is the Product's:
//
//   T, kWarps, kTokens, kColumns (of a tile), kStep (of K, a stage of a ring), kStages
//   kPad: K is filled up with zeros to a multiple of it, the same for all tiles
//   Product(lane): sums of 0
//   multiply(stage): adds a stage; in it come the tokens' rows of kStep elements, then the columns'
//   put<half>(sums, stride): the tile's sums, or the half of its tokens that half is, to rows
#pragma once

#include "gemm_plain.cuh"

namespace minivllm::cuda::plain {

struct SplitProblem {
  const void* x;
  const void* weight;
  int64_t x_stride;
  int k, part;  // part: of K, that a warp has; a multiple of every kStep
  Tiles tiles;
  Output output;
};

template <typename Product>
struct SplitPlan {
  using T = typename Product::T;
  static constexpr int kThreads = Product::kWarps * kWarpSize;
  static constexpr int kTokenBytes =
      Product::kTokens * Product::kStep * static_cast<int>(sizeof(T));
  static constexpr int kStageBytes =
      kTokenBytes + Product::kColumns * Product::kStep * static_cast<int>(sizeof(T));
  static constexpr int kRingBytes = Product::kStages * kStageBytes;
  static constexpr int kSmem = Product::kWarps * kRingBytes;
  // The sums of all warps meet in the rings' room: in two halves where it would not hold them.
  static constexpr int kSumRow = Product::kColumns + 8;
  static constexpr int sum_bytes(int halves) {
    return Product::kWarps * Product::kTokens / halves * kSumRow * static_cast<int>(sizeof(float));
  }
  static constexpr int kHalves = sum_bytes(1) <= kSmem ? 1 : 2;
  static constexpr int kHalfTokens = Product::kTokens / kHalves;
  static_assert(sum_bytes(kHalves) <= kSmem);
};

template <typename Product, bool kVec>
__global__ void __launch_bounds__(SplitPlan<Product>::kThreads)
    split_kernel(const __grid_constant__ SplitProblem p) {
  using T = typename Product::T;
  using Plan = SplitPlan<Product>;
  extern __shared__ uint4 smem[];
  pdl_launch_dependents();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int2 tile = p.tiles.at(static_cast<int>(blockIdx.x));
  const int first_token = tile.x * Product::kTokens, first_column = tile.y * Product::kColumns;
  const Rows<T> x = {static_cast<const T*>(p.x) + first_token * p.x_stride, p.x_stride,
                     p.output.num_tokens - first_token, p.k};
  const Rows<T> weight = {
      static_cast<const T*>(p.weight) + static_cast<int64_t>(first_column) * p.k, p.k,
      p.output.n - first_column, p.k};
  const int begin = warp * p.part;
  const int left = (p.k - begin + Product::kPad - 1) / Product::kPad * Product::kPad;
  const int steps = min(p.part, left) / Product::kStep;
  const uint8_t* const room = reinterpret_cast<const uint8_t*>(smem) + warp * Plan::kRingBytes;
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(room));
  const auto stage = [](int step) { return step % Product::kStages * Plan::kStageBytes; };
  const auto copy_weight = [&](int step) {
    copy_rows<Product::kColumns, Product::kStep, kWarpSize, kVec>(
        ring + stage(step) + Plan::kTokenBytes, weight, begin + step * Product::kStep, lane);
  };
  const auto copy_x = [&](int step) {
    copy_rows<Product::kTokens, Product::kStep, kWarpSize, kVec>(
        ring + stage(step), x, begin + step * Product::kStep, lane);
  };
  constexpr int kAhead = Product::kStages - 1;
#pragma unroll
  for (int step = 0; step < kAhead; ++step)
    if (step < steps) copy_weight(step);
  pdl_wait();
#pragma unroll
  for (int step = 0; step < kAhead; ++step) {
    if (step < steps) copy_x(step);
    commit_copies();
  }

  Product product(lane);
  for (int step = 0; step < steps; ++step) {
    wait_copies<kAhead - 1>();
    __syncwarp();
    if (step + kAhead < steps) {
      copy_weight(step + kAhead);
      copy_x(step + kAhead);
    }
    commit_copies();
    product.multiply(room + stage(step));
  }

  float* const sums = reinterpret_cast<float*>(smem);  // [kWarps][kHalfTokens][kSumRow]
  constexpr int kWarpSums = Plan::kHalfTokens * Plan::kSumRow;
  const int parts = (p.k + p.part - 1) / p.part;
  const auto add_up = [&](int half) {
    __syncthreads();
    constexpr int kPairs = Product::kColumns / 2;
    for (int i = threadIdx.x; i < Plan::kHalfTokens * kPairs; i += Plan::kThreads) {
      const int token = i / kPairs, column = i % kPairs * 2;
      const float* at = sums + token * Plan::kSumRow + column;
      float2 total = *reinterpret_cast<const float2*>(at);
#pragma unroll
      for (int part = 1; part < Product::kWarps; ++part) {
        if (part >= parts) break;
        const float2 sum = *reinterpret_cast<const float2*>(at + part * kWarpSums);
        total.x += sum.x;
        total.y += sum.y;
      }
      store_pair<T>(p.output, first_token + half * Plan::kHalfTokens + token, first_column + column,
                    total.x, total.y);
    }
  };
  wait_copies<0>();
  __syncthreads();
  product.template put<Plan::kHalves, 0>(sums + warp * kWarpSums, Plan::kSumRow);
  add_up(0);
  if constexpr (Plan::kHalves == 2) {
    __syncthreads();
    product.template put<Plan::kHalves, 1>(sums + warp * kWarpSums, Plan::kSumRow);
    add_up(1);
  }
}

template <typename Product, bool kVec = true>
void launch_split(const LinearParams& p, int part, Stream stream) {
  using Plan = SplitPlan<Product>;
  SplitProblem problem = {};
  problem.x = p.x;
  problem.weight = p.weight;
  problem.x_stride = p.x_stride;
  problem.k = static_cast<int>(p.k);
  problem.part = part;
  problem.tiles = {ceil_div(p.num_tokens, Product::kTokens), ceil_div(p.n, Product::kColumns)};
  problem.output = output_of(p, sizeof(typename Product::T));
  const int64_t tiles = tiles_of(p, Product::kTokens, Product::kColumns);
  MINIVLLM_LAUNCH(split_kernel<Product, kVec>, dim3(static_cast<unsigned>(tiles)),
                  dim3(Plan::kThreads), Plan::kSmem, stream, problem);
}

}  // namespace minivllm::cuda::plain
