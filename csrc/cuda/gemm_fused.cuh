// What a decoder layer wants between its products, done by their epilogues where there are few
// tokens (and some of it in wide tiles, see gemm_staged.cuh): the first half of the next RMSNorm
// (kNormColumns in kernels.h), the rotation of queries and keys and the way of keys and values into
// their blocks (RopeKvTo). A tile's 64 columns are one head, and those of one square sum.
// weigh_rows.cu and rope_kv.cu give the same bits.
#pragma once

#include "gemm_epilogue.cuh"
#include "rope.cuh"

namespace minivllm::cuda::gemm {

constexpr int kGroup = static_cast<int>(kNormColumns);  // columns: a square sum's, and a head's
constexpr int kGroupPairs = kGroup / 8;                 // that a thread has in a row of a group
constexpr int kHalfHead = kGroup / 2;

// Of a thread's two rows: where their angles are, and their keys in the cache.
struct RopeRows {
  const float* angles[2];  // cosines, then sines
  int64_t keys[2];         // of head 0, in elements; -1: nowhere

  __device__ __forceinline__ RopeRows() {}
  __device__ __forceinline__ RopeRows(const Output& o, const Place& at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = at.token + at.row() + 8 * h;
      const bool exists = token < o.num_tokens;
      const int64_t position = exists ? load_settled(o.rope.positions + token) : 0;
      const int64_t slot = exists ? load_settled(o.rope.slots + token) : -1;
      const bool in_table = position >= 0 && position < o.rope.max_position;
      angles[h] = o.rope.cos_sin + (in_table ? position : 0) * kGroup;
      keys[h] = in_table ? key_offset(o.rope.kv, slot, position, 0) : -1;
    }
  }
};

// A head of q, k or v, counted through all three.
struct Head {
  bool is_query, is_value;
  int64_t offset;  // from a row's key of head 0 to this head's key or value

  __device__ __forceinline__ Head(const RopeKvTo& rope, int head) {
    const int64_t num_kv = rope.kv.num_kv_heads;
    const int64_t from_key = head - rope.num_q_heads;
    is_query = from_key < 0;
    is_value = from_key >= num_kv;
    // A block's values lie behind all of its keys, as further heads would.
    offset = from_key * rope.kv.block_size * kGroup;
  }
};

// Rotates a row's pairs of a head: y[4 i] and y[4 i + 1] with those of half a head further.
__device__ __forceinline__ void rotate(float* y, const float* angles, int lane) {
#pragma unroll
  for (int i = 0; i < kGroupPairs / 2; ++i) {
    const float2 c = *reinterpret_cast<const float2*>(angles + 8 * i + 2 * (lane % 4));
    const float2 s = *reinterpret_cast<const float2*>(angles + kHalfHead + 8 * i + 2 * (lane % 4));
    float* low = y + 4 * i;
    float* high = low + 4 * (kGroupPairs / 2);
    rotate_pair(low[0], high[0], c.x, s.x);
    rotate_pair(low[1], high[1], c.y, s.y);
  }
}

// A tile of q, k or v, rounded, rotated and rounded again.
template <typename T>
__device__ __forceinline__ void store_rope(float (&acc)[kGroup / 2], const RopeRows& rows,
                                           const Output& o, const Place& at) {
  const Head head(o.rope, at.column / kGroup);
#pragma unroll
  for (int i = 0; i < kGroup / 2; ++i) acc[i] = to_float(from_float<T>(acc[i]));
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (at.token + 16 * at.warp + 8 * h >= o.num_tokens) break;  // the warp has no such rows
    const int64_t token = at.token + at.row() + 8 * h;
    float* y = acc + 2 * h;
    if (!head.is_value) rotate(y, rows.angles[h], at.lane);
    T* to = static_cast<T*>(o.rope.kv.cache) + rows.keys[h] + head.offset;
    if (head.is_query) to = static_cast<T*>(o.out) + token * o.stride + at.column;
    if (token >= o.num_tokens || (!head.is_query && rows.keys[h] < 0)) continue;
#pragma unroll
    for (int i = 0; i < kGroupPairs; ++i)
      *reinterpret_cast<uint32_t*>(to + 8 * i + 2 * (at.lane % 4)) =
          pack(y[4 * i], y[4 * i + 1], T{});
  }
}

// The norm's weights of a thread's columns.
template <typename T>
__device__ __forceinline__ void load_weights(uint32_t (&weights)[kGroupPairs], const Output& o,
                                             const Place& at) {
  const T* from = static_cast<const T*>(o.norm_weight) + at.column + 2 * (at.lane % 4);
#pragma unroll
  for (int i = 0; i < kGroupPairs; ++i)
    weights[i] = *reinterpret_cast<const uint32_t*>(from + 8 * i);
}

// The new residual, that times the norm's weights, its square sums.
template <typename T>
__device__ __forceinline__ void store_weighed(const float (&acc)[kGroup / 2],
                                              const uint32_t (&old)[kGroup / 4],
                                              const uint32_t (&weights)[kGroupPairs],
                                              const Output& o, const Place& at) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (at.token + 16 * at.warp + 8 * h >= o.num_tokens) break;  // the warp has no such rows
    const int64_t token = at.token + at.row() + 8 * h;
    const bool exists = token < o.num_tokens;
    const int column = at.column + 2 * (at.lane % 4);
    T* out = static_cast<T*>(o.out) + token * o.stride + column;
    T* weighted = static_cast<T*>(o.weighted) + token * o.n + column;
    float pairs[kGroupPairs];
#pragma unroll
    for (int i = 0; i < kGroupPairs; ++i) {
      const float2 r = unpack(old[2 * i + h], T{});
      const uint32_t pair = pack(r.x + acc[4 * i + 2 * h], r.y + acc[4 * i + 2 * h + 1], T{});
      const float2 v = unpack(pair, T{}), w = unpack(weights[i], T{});
      pairs[i] = split_norm::pair_square(v.x, v.y);
      if (!exists) continue;
      *reinterpret_cast<uint32_t*>(out + 8 * i) = pair;
      *reinterpret_cast<uint32_t*>(weighted + 8 * i) =
          pack(__fmul_rn(v.x, w.x), __fmul_rn(v.y, w.y), T{});
    }
    const float sum = split_norm::quad_sum(split_norm::add_pairs(pairs));
    if (exists && at.lane % 4 == 0)
      o.new_square_sums[token * (o.n / kGroup) + at.column / kGroup] = sum;
  }
}

}  // namespace minivllm::cuda::gemm
