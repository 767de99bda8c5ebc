// The arithmetic of attention, written once for the decode and the prefill kernels, so that a query
// row comes out with the same bits from either. https://arxiv.org/abs/2205.14135
//
// One query row: keys in splits of 256 absolute positions, in tiles of 64 inside a split.
//   tile:  s = q k^T (k16 tensor-core steps over head_dim, in order), masked;
//          m' = max(m, max s);  p = 2^(s c - m' c), c = scale log2(e);  l = l 2^(m c - m' c) + sum
//          p o = o 2^(m c - m' c) + P v, P in 16 bits (k16 steps over the keys, in order)
//   split: starts from m = -inf, l = 0, o = 0
//   row:   splits merge in order, the first as it is; out = o / l
// A row's 64 scores lie in four threads (a quad), in the layout of the tensor cores' accumulators:
// thread t of a warp holds, of the rows t / 4 (h = 0) and t / 4 + 8 (h = 1), the columns
// 8 i + 2 (t % 4) + {0, 1} at [4 i + 2 h + {0, 1}]. mma.sync and wgmma give the same bits for the
// same chain. Each thread adds its columns in a fixed tree, the quad adds up at the split's end.
// A tile or split that is masked for a row changes no bit of it. Every product and sum whose
// contraction the compiler could choose is spelled out.
#pragma once

#include <cmath>

#include "common.cuh"
#include "sm80.cuh"

namespace minivllm::cuda::attention {

using sm80::commit_copies;
using sm80::copy_async;
using sm80::load_matrices;
using sm80::load_matrices_transposed;
using sm80::mma;
using sm80::wait_copies;

constexpr int kTileTokens = 64;
constexpr int kSplitTokens = 256;
constexpr int kTilesPerSplit = kSplitTokens / kTileTokens;
constexpr int kMmaRows = 16;                         // rows of one warp's product
constexpr int kMmaDepth = 16;                        // the k of one step
constexpr int kTileBlocks = kTileTokens / 8;         // 8-column blocks of a tile of scores
constexpr int kTileSteps = kTileTokens / kMmaDepth;  // k16 steps over a tile's keys
constexpr int kScores = kTileBlocks * 4;             // scores of a tile in one thread
constexpr float kLog2e = 1.4426950408889634f;

// ---- softmax ----------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(kFullMask, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(kFullMask, x, 2));
}

// Hides the keys past each row's own: last[h] is the last visible column of the tile for row h.
__device__ __forceinline__ void mask_scores(float (&s)[kScores], int last0, int last1) {
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int i = 0; i < kTileBlocks; ++i) {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (8 * i + column + e > last0) s[4 * i + e] = -INFINITY;
      if (8 * i + column + e > last1) s[4 * i + 2 + e] = -INFINITY;
    }
  }
}

// The largest score of row h in the tile, the same in the four threads of the quad.
template <int h>
__device__ __forceinline__ float max_score(const float (&s)[kScores]) {
  float m[kTileBlocks];
#pragma unroll
  for (int i = 0; i < kTileBlocks; ++i) m[i] = fmaxf(s[4 * i + 2 * h], s[4 * i + 2 * h + 1]);
#pragma unroll
  for (int width = kTileBlocks / 2; width > 0; width /= 2)
#pragma unroll
    for (int i = 0; i < width; ++i) m[i] = fmaxf(m[i], m[i + width]);
  m[0] = fmaxf(m[0], __shfl_xor_sync(kFullMask, m[0], 1));
  return fmaxf(m[0], __shfl_xor_sync(kFullMask, m[0], 2));
}

// m c, or 0 where every key so far is masked: what is taken from the exponents.
__device__ __forceinline__ float exponent_shift(float m, float c) {
  return m == -INFINITY ? 0.f : __fmul_rn(m, c);
}

// What the sums so far are multiplied by when the maximum grows from `before` to one whose shift is
// given: exactly 1 where it does not grow.
__device__ __forceinline__ float rescale_factor(float before, float c, float shift) {
  return exp2_fast(__fsub_rn(__fmul_rn(before, c), shift));
}

// Scores of row h to probabilities (unnormalised), in place; returns this thread's part of the sum.
template <int h>
__device__ __forceinline__ float exponentiate(float (&s)[kScores], float c, float shift) {
  float sum[kTileBlocks];
#pragma unroll
  for (int i = 0; i < kTileBlocks; ++i) {
    float& a = s[4 * i + 2 * h];
    float& b = s[4 * i + 2 * h + 1];
    a = exp2_fast(fmaf(a, c, -shift));
    b = exp2_fast(fmaf(b, c, -shift));
    sum[i] = __fadd_rn(a, b);
  }
#pragma unroll
  for (int width = kTileBlocks / 2; width > 0; width /= 2)
#pragma unroll
    for (int i = 0; i < width; ++i) sum[i] = __fadd_rn(sum[i], sum[i + width]);
  return sum[0];
}

// l after a tile. Both kernels add a thread's part before the quad adds up.
__device__ __forceinline__ float add_tile(float l, float factor, float tile_sum) {
  return fmaf(l, factor, tile_sum);
}

// The row so far and one more split. `keep` and `take` multiply the two; a split that the row does
// not see is left out.
struct Merge {
  float keep, take;
  bool empty;
};

__device__ __forceinline__ Merge merge_split(float& m, float& l, float split_m, float split_l,
                                             float c) {
  Merge merge;
  merge.empty = split_m == -INFINITY;
  const float top = fmaxf(m, split_m);
  const float shift = exponent_shift(top, c);
  merge.keep = rescale_factor(m, c, shift);
  merge.take = rescale_factor(split_m, c, shift);
  if (!merge.empty) {
    m = top;
    l = fmaf(l, merge.keep, __fmul_rn(split_l, merge.take));
  }
  return merge;
}

__device__ __forceinline__ float merge_value(const Merge& merge, float o, float split_o) {
  return merge.empty ? o : fmaf(o, merge.keep, __fmul_rn(split_o, merge.take));
}

__device__ __forceinline__ float inverse_sum(float l) { return __frcp_rn(l); }
__device__ __forceinline__ float normalise(float o, float inverse) { return __fmul_rn(o, inverse); }

// ---- tensor cores -----------------------------------------------------------------------------

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  uint32_t word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  uint32_t word;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}

// The left operand of step k of P v: the accumulators' layout is that of the operand.
template <typename T>
__device__ __forceinline__ void probability_operand(uint32_t (&a)[4], const float (&p)[kScores],
                                                    int k) {
#pragma unroll
  for (int i = 0; i < 4; ++i) a[i] = pack<T>(p[8 * k + 2 * i], p[8 * k + 2 * i + 1]);
}

// Queries of one warp's 16 rows as left operands, from global memory. rows[h] points at the row
// t / 4 + 8 h of the product, null: zeros.
template <typename T, int kHeadDim>
__device__ __forceinline__ void load_queries(uint32_t (&a)[kHeadDim / kMmaDepth][4], const T* row0,
                                             const T* row1) {
  const int column = 2 * (threadIdx.x % 4);
#pragma unroll
  for (int k = 0; k < kHeadDim / kMmaDepth; ++k) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int d = kMmaDepth * k + 8 * half + column;
      a[k][2 * half] = row0 ? *reinterpret_cast<const uint32_t*>(row0 + d) : 0;
      a[k][2 * half + 1] = row1 ? *reinterpret_cast<const uint32_t*>(row1 + d) : 0;
    }
  }
}

// ---- keys and values in shared memory -----------------------------------------------------------

// Where 16-byte piece `piece` of row `row` lies in a tile of keys or values: in panels of 64
// columns where head_dim is a multiple of that, as TMA writes them with its 128-byte swizzle, else
// in rows without gaps. Pieces are permuted so that eight rows' pieces of one index fall in
// different banks.
template <int kHeadDim>
__device__ __forceinline__ uint32_t tile_offset(int row, int piece) {
  constexpr int kPieces = kHeadDim / 8;
  if constexpr (kPieces % 8 == 0) {
    return ((piece / 8 * kTileTokens + row) * 8 + ((piece % 8) ^ (row % 8))) * 16;
  } else {
    constexpr int kMask = kPieces % 4 == 0 ? 3 : 1;
    constexpr int kShift = kPieces % 4 == 0 ? 1 : 2;
    return (row * kPieces + (piece ^ ((row >> kShift) & kMask))) * 16;
  }
}

// s = q k^T for one warp's rows and a tile of keys at `keys`.
template <typename T, int kHeadDim>
__device__ __forceinline__ void score_tile(float (&s)[kScores],
                                           const uint32_t (&q)[kHeadDim / kMmaDepth][4],
                                           uint32_t keys) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < kScores; ++i) s[i] = 0.f;
  // Matrices of one load: keys 0-7 and 8-15 of a group of 16, each at two pieces of head_dim.
  const int row = lane % 8 + 8 * (lane / 16), piece = lane / 8 % 2;
#pragma unroll
  for (int k = 0; k < kHeadDim / kMmaDepth; ++k) {
#pragma unroll
    for (int i = 0; i < kTileBlocks; i += 2) {
      uint32_t b[4];
      load_matrices(b, keys + tile_offset<kHeadDim>(8 * i + row, 2 * k + piece));
      mma<T>(s + 4 * i, q[k], b[0], b[1]);
      mma<T>(s + 4 * i + 4, q[k], b[2], b[3]);
    }
  }
}

// o[16, 8] += P v for the eight columns of head_dim at `piece`, steps k and k + 1 of the tile.
template <typename T, int kHeadDim>
__device__ __forceinline__ void value_steps(float* o, const uint32_t (&p0)[4],
                                            const uint32_t (&p1)[4], uint32_t values, int k,
                                            int piece) {
  uint32_t b[4];
  load_matrices_transposed(
      b, values + tile_offset<kHeadDim>(kMmaDepth * k + threadIdx.x % kWarpSize, piece));
  mma<T>(o, p0, b[0], b[1]);
  mma<T>(o, p1, b[2], b[3]);
}

// ---- the cache ----------------------------------------------------------------------------------

// Row of the cache (in units of head_dim elements) where the key at `position` lies; its value lies
// num_kv_heads * block_size rows further. 32 bits hold every row of a pool that fits a card.
__device__ __forceinline__ uint32_t key_row(const KvCache& kv, const int32_t* table, int kv_head,
                                            int position) {
  const unsigned block_size = static_cast<unsigned>(kv.block_size);
  const unsigned index = static_cast<unsigned>(position) / block_size;
  const unsigned offset = static_cast<unsigned>(position) - index * block_size;
  const uint32_t heads = static_cast<uint32_t>(kv.num_kv_heads);
  return (static_cast<uint32_t>(table[index]) * 2 * heads + kv_head) * block_size + offset;
}

}  // namespace minivllm::cuda::attention
