// The arithmetic of one split in decode attention: four warps, warp w scores tile w, all exchange
// the tiles' maxima, warp w makes tile w's probabilities, then each warp multiplies all tiles'
// values for its columns. The block synchronises after each of the two steps that publish
// something.
#pragma once

#include "decode_work.cuh"

namespace minivllm::cuda::attention {

// Shared memory of one split.
struct SplitExchange {
  static constexpr int kProbabilityBytes = kMmaRows * kSplitTokens * 2;
  static constexpr int kMaximaBytes = kTilesPerSplit * kMmaRows * 4;
  static constexpr int kSumBytes = kTilesPerSplit * kWarpSize * 8;
  static constexpr int kBytes = kProbabilityBytes + kMaximaBytes + kSumBytes;
  static constexpr int kTileOperands = kTileSteps * kWarpSize;
  uint4* probabilities;  // [tile][step][lane], tiles tile_stride apart
  int tile_stride;
  float2* sums;   // [tile][lane]
  float* maxima;  // [tile][row]

  __device__ explicit SplitExchange(uint8_t* smem)
      : SplitExchange(smem, kTileOperands, smem + kProbabilityBytes) {}
  // Probabilities in places of their own.
  __device__ SplitExchange(uint8_t* tiles, int stride, uint8_t* rest)
      : probabilities(reinterpret_cast<uint4*>(tiles)),
        tile_stride(stride),
        sums(reinterpret_cast<float2*>(rest)),
        maxima(reinterpret_cast<float*>(rest + kSumBytes)) {}
};

// Step 1. `last` is the last visible column of the tile; rows 8 .. 15 are left out unless `both`.
__device__ __forceinline__ void publish_maxima(float (&s)[kScores], int last, bool both,
                                               const SplitExchange& x) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (last < kTileTokens - 1) mask_scores(s, last, last);
  const float top = max_score<0>(s);
  if (lane % 4 == 0) x.maxima[warp * kMmaRows + lane / 4] = top;
  if (both) {
    const float other = max_score<1>(s);
    if (lane % 4 == 0) x.maxima[warp * kMmaRows + lane / 4 + 8] = other;
  }
}

// Running maxima of a row over the tiles of a split, as every warp works them out from all tiles'
// maxima: the factor of each tile, and the shift of tile `own`.
template <int h>
__device__ __forceinline__ float run_maxima(float (&factor)[kTilesPerSplit][2], const float* maxima,
                                            int tiles, int own, float c, float& own_shift) {
  float m = -INFINITY;
#pragma unroll
  for (int t = 0; t < kTilesPerSplit; ++t) {
    if (t >= tiles) break;
    const float before = m;
    m = fmaxf(m, maxima[t * kMmaRows + threadIdx.x % kWarpSize / 4 + 8 * h]);
    const float shift = exponent_shift(m, c);
    factor[t][h] = rescale_factor(before, c, shift);
    if (t == own) own_shift = shift;
  }
  return m;
}

// Step 2. Turns the scores of this warp's tile (if it has one) into probabilities.
template <typename T, int kHeadDim>
__device__ __forceinline__ void publish_probabilities(float (&s)[kScores], int tiles, bool both,
                                                      float c, const SplitExchange& x,
                                                      float (&factor)[kTilesPerSplit][2],
                                                      RowState<kHeadDim>& state) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  float shift0 = 0.f, shift1 = 0.f;
  state.m[0] = run_maxima<0>(factor, x.maxima, tiles, warp, c, shift0);
  state.m[1] = -INFINITY;
  if (both) state.m[1] = run_maxima<1>(factor, x.maxima, tiles, warp, c, shift1);
  if (warp >= tiles) return;
  float2 sum = make_float2(0.f, 0.f);
  sum.x = exponentiate<0>(s, c, shift0);
  if (both) sum.y = exponentiate<1>(s, c, shift1);
  x.sums[warp * kWarpSize + lane] = sum;
#pragma unroll
  for (int k = 0; k < kTileSteps; ++k) {
    uint32_t a[4];
    probability_operand<T>(a, s, k);
    x.probabilities[warp * x.tile_stride + k * kWarpSize + lane] =
        make_uint4(a[0], a[1], a[2], a[3]);
  }
}

// Step 3, tile after tile: the sums and this warp's columns of o.
template <typename T, int kHeadDim>
__device__ __forceinline__ void add_values(RowState<kHeadDim>& state, int t,
                                           const float (&factor)[2], const SplitExchange& x,
                                           uint32_t values) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  if (t == 0) {
    state.l[0] = state.l[1] = 0.f;
#pragma unroll
    for (int b = 0; b < RowState<kHeadDim>::kBlocks; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) state.o[b][i] = 0.f;
  }
  const float2 sum = x.sums[t * kWarpSize + lane];
  state.l[0] = add_tile(state.l[0], factor[0], sum.x);
  state.l[1] = add_tile(state.l[1], factor[1], sum.y);
  uint32_t a[kTileSteps][4];
#pragma unroll
  for (int k = 0; k < kTileSteps; ++k) {
    const uint4 word = x.probabilities[t * x.tile_stride + k * kWarpSize + lane];
    a[k][0] = word.x, a[k][1] = word.y, a[k][2] = word.z, a[k][3] = word.w;
  }
#pragma unroll
  for (int b = 0; b < RowState<kHeadDim>::kBlocks; ++b)
#pragma unroll
    for (int i = 0; i < 4; ++i) state.o[b][i] = __fmul_rn(state.o[b][i], factor[i / 2]);
#pragma unroll
  for (int k = 0; k < kTileSteps; k += 2) {
#pragma unroll
    for (int b = 0; b < RowState<kHeadDim>::kBlocks; ++b) {
      const int piece = kDecodeWarps * b + warp;
      if (kHeadDim / 8 % kDecodeWarps == 0 || piece < kHeadDim / 8)
        value_steps<T, kHeadDim>(state.o[b], a[k], a[k + 1], values, k, piece);
    }
  }
}

// The quad's sums, once the split's tiles are in.
template <int kHeadDim>
__device__ __forceinline__ void end_split(RowState<kHeadDim>& state) {
  state.l[0] = quad_sum(state.l[0]);
  state.l[1] = quad_sum(state.l[1]);
}

}  // namespace minivllm::cuda::attention
