// One warp's work on one row of decode attention: the arithmetic of attention_common.cuh with the
// products the other way round. Keys, then columns of head_dim, are the sixteen rows of a product
// and the query heads of a KV head its eight columns, so few heads waste half as much as they would
// as rows; which of two operands is which changes no bit of a product.
//   s^T [keys, heads] = k q^T      o^T [head_dim, heads] += v^T P^T
// Accumulators: thread t of the warp holds rows t / 4 + 8 h, columns 2 (t % 4) + e at [2 h + e]. So
// its keys of a tile are 8 i + t / 4, and lanes 4 apart hold neighbours: lane t owns head
// 2 (t % 4) + t / 4 % 2 of the two whose scores it holds, in maxima and sums; of the sums it has
// the part that thread t / 8 of a quad has in attention_common.cuh's layout.
#pragma once

#include "decode_work.cuh"

namespace minivllm::cuda::attention {

// An 8 x 8 matrix of 16-bit elements, one row a quad, to its transpose.
__device__ __forceinline__ uint32_t transpose_matrix(uint32_t word) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

// What this lane and the one that owns its other head know, in the order of the heads.
__device__ __forceinline__ float2 both_heads(float own) {
  const float other = __shfl_xor_sync(kFullMask, own, 4);
  return threadIdx.x & 4 ? make_float2(other, own) : make_float2(own, other);
}
// Gives the other head's value to its owner; returns {this lane's, the other lane's} of its own.
__device__ __forceinline__ float2 own_head(float first, float second) {
  const bool odd = threadIdx.x & 4;
  const float other = __shfl_xor_sync(kFullMask, odd ? first : second, 4);
  return make_float2(odd ? second : first, other);
}

constexpr int kWarpHeads = 8;  // query heads of a head tile, at most

template <typename T, int kHeadDim>
struct WarpRow {
  static constexpr int kDepth = kHeadDim / kMmaDepth;
  static constexpr int kKeyBlocks = kTileTokens / kMmaRows;
  static constexpr int kRowBytes = 128;  // of a panel of 64 columns
  static_assert(kHeadDim % 64 == 0);
  uint32_t q[kDepth][2];
  float m, l;  // of the split
  float o[kDepth][4];
  float row_m, row_l;  // of the row's splits so far
  float row_o[kDepth][4];

  // from: the first of `heads` query heads.
  __device__ void load_queries(const T* from, int heads) {
    const int lane = threadIdx.x % kWarpSize;
    const int head = lane / 4;
    const T* row = from + head * kHeadDim + 2 * (lane % 4);
#pragma unroll
    for (int k = 0; k < kDepth; ++k)
#pragma unroll
      for (int half = 0; half < 2; ++half)
        q[k][half] =
            head < heads ? *reinterpret_cast<const uint32_t*>(row + kMmaDepth * k + 8 * half) : 0;
  }

  __device__ void begin_split() {
    m = -INFINITY;
    l = 0.f;
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[d][i] = 0.f;
  }

  using Scores = float[kKeyBlocks][4];

  // Address of a lane's row in a load of matrices, of the piece `piece` + 0 or 1 (which is in
  // `lane_at`) and `row` rows further. As tile_offset; the tile starts at a swizzle atom, so pieces
  // are bits of the address, and an exclusive or for each is all that a loop has to do.
  __device__ static uint32_t panel_address(uint32_t lane_at, int piece, int row) {
    return (lane_at ^ (piece % 8 * 16)) + (piece / 8 * kTileTokens + row) * kRowBytes;
  }
  __device__ static uint32_t lane_address(uint32_t tile, int row, int piece) {
    return tile + row * kRowBytes + (piece ^ (row % 8)) * 16;
  }

  __device__ void score(Scores& s, uint32_t keys) const {
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t at = lane_address(keys, lane % kMmaRows, lane / kMmaRows);
#pragma unroll
    for (int b = 0; b < kKeyBlocks; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) s[b][i] = 0.f;
#pragma unroll
    for (int k = 0; k < kDepth; ++k) {
#pragma unroll
      for (int b = 0; b < kKeyBlocks; ++b) {
        uint32_t a[4];
        load_matrices(a, panel_address(at, 2 * k, kMmaRows * b));
        mma<T>(s[b], a, q[k][0], q[k][1]);
      }
    }
  }

  // Scores of a tile, of whose keys those up to `last` are visible, to the right operands of P v;
  // o is made ready for them.
  __device__ void soften(Scores& s, int last, float c, uint32_t (&p)[kTileBlocks]) {
    const int lane = threadIdx.x % kWarpSize;
    if (last < kTileTokens - 1) {
#pragma unroll
      for (int i = 0; i < kTileBlocks; ++i)
        if (8 * i + lane / 4 > last) s[i / 2][i % 2 * 2] = s[i / 2][i % 2 * 2 + 1] = -INFINITY;
    }
    float top[2][kTileBlocks];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
#pragma unroll
      for (int i = 0; i < kTileBlocks; ++i) top[e][i] = s[i / 2][i % 2 * 2 + e];
#pragma unroll
      for (int width = kTileBlocks / 2; width > 0; width /= 2)
#pragma unroll
        for (int i = 0; i < width; ++i) top[e][i] = fmaxf(top[e][i], top[e][i + width]);
    }
    const float2 tops = own_head(top[0][0], top[1][0]);
    float most = fmaxf(tops.x, tops.y);
    most = fmaxf(most, __shfl_xor_sync(kFullMask, most, 8));
    most = fmaxf(most, __shfl_xor_sync(kFullMask, most, 16));
    most = fmaxf(m, most);
    const float shift = exponent_shift(most, c);
    const float2 shifts = both_heads(shift);
    const float factor = rescale_factor(m, c, shift);
    const float2 factors = both_heads(factor);
    m = most;
    float sum[kTileBlocks];
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
      float& first = s[i / 2][i % 2 * 2];
      float& second = s[i / 2][i % 2 * 2 + 1];
      first = exp2_fast(fmaf(first, c, -shifts.x));
      second = exp2_fast(fmaf(second, c, -shifts.y));
      p[i] = transpose_matrix(pack<T>(first, second));
      const float2 pair = own_head(first, second);
      sum[i] = __fadd_rn(pair.x, pair.y);
    }
#pragma unroll
    for (int width = kTileBlocks / 2; width > 0; width /= 2)
#pragma unroll
      for (int i = 0; i < width; ++i) sum[i] = __fadd_rn(sum[i], sum[i + width]);
    l = add_tile(l, factor, sum[0]);
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) o[d][i] = __fmul_rn(o[d][i], i % 2 == 0 ? factors.x : factors.y);
  }

  template <bool kEnds>
  __device__ void add_values(const uint32_t (&p)[kTileBlocks], uint32_t values, int last) {
    const int lane = threadIdx.x % kWarpSize;
    const uint32_t at = lane_address(values, lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < kTileSteps; ++k) {
      // Which of this lane's two pairs of neighbouring keys exist.
      uint32_t exist[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int key = kMmaDepth * k + 8 * i + 2 * (lane % 4);
        exist[i] = (key <= last ? 0xffffu : 0u) | (key < last ? 0xffff0000u : 0u);
      }
#pragma unroll
      for (int d = 0; d < kDepth; ++d) {
        uint32_t a[4];
        load_matrices_transposed(a, panel_address(at, 2 * d, kMmaDepth * k));
        if (kEnds) {
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] &= exist[i / 2];
        }
        mma<T>(o[d], a, p[2 * k], p[2 * k + 1]);
      }
    }
  }

  // Of a tile the values up to `last` exist; those behind may be anything, and 0 * NaN is NaN.
  __device__ void add_values(const uint32_t (&p)[kTileBlocks], uint32_t values, int last) {
    if (last < kTileTokens - 1) {
      add_values<true>(p, values, last);
    } else {
      add_values<false>(p, values, last);
    }
  }

  // The split's sums, once its tiles are in.
  __device__ void end_split() {
    l = __fadd_rn(l, __shfl_xor_sync(kFullMask, l, 8));
    l = __fadd_rn(l, __shfl_xor_sync(kFullMask, l, 16));
  }

  // The split as the row's first.
  __device__ void begin_row() {
    row_m = m;
    row_l = l;
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) row_o[d][i] = o[d][i];
  }
  // The split as the row's next.
  __device__ void merge(float c) {
    const Merge own = merge_split(row_m, row_l, m, l, c);
    const float2 keep = both_heads(own.keep), take = both_heads(own.take);
    const float2 empty = both_heads(own.empty ? 1.f : 0.f);
    const Merge heads[2] = {{keep.x, take.x, empty.x != 0.f}, {keep.y, take.y, empty.y != 0.f}};
#pragma unroll
    for (int d = 0; d < kDepth; ++d)
#pragma unroll
      for (int i = 0; i < 4; ++i) row_o[d][i] = merge_value(heads[i % 2], row_o[d][i], o[d][i]);
  }

  // A partial is m, l and o of `heads` query heads; here the row so far.
  __device__ void store(float* to, int heads) const {
    const int lane = threadIdx.x % kWarpSize;
    const int own = 2 * (lane % 4) + lane / 4;
    if (lane < 8 && own < heads) {
      __stcg(to + own, row_m);
      __stcg(to + heads + own, row_l);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = 2 * (lane % 4) + i % 2;
      if (head >= heads) continue;
      float* row = to + 2 * heads + head * kHeadDim + lane / 4 + i / 2 * 8;
#pragma unroll
      for (int d = 0; d < kDepth; ++d) __stcg(row + kMmaDepth * d, row_o[d][i]);
    }
  }
  __device__ void write(T* out, int heads) const {
    const int lane = threadIdx.x % kWarpSize;
    const float2 inverse = both_heads(inverse_sum(row_l));
    const int head = lane / 4;
#pragma unroll
    for (int d = 0; d < kDepth; ++d) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint32_t word = transpose_matrix(pack<T>(normalise(row_o[d][2 * h], inverse.x),
                                                       normalise(row_o[d][2 * h + 1], inverse.y)));
        T* at = out + head * kHeadDim + kMmaDepth * d + 8 * h + 2 * (lane % 4);
        if (head < heads) *reinterpret_cast<uint32_t*>(at) = word;
      }
    }
  }
};

}  // namespace minivllm::cuda::attention
