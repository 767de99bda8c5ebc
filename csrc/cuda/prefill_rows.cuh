// Which query rows a block of the prefill kernels works on. The rows of one sequence and one KV
// head are (token, query head) pairs, heads innermost: a tile of rows spans few tokens, so short
// runs of new tokens fill tiles and little of the causal triangle is wasted.
#pragma once

#include "attention_common.cuh"

namespace minivllm::cuda::attention {

struct QueryTile {
  int seq;   // num_seqs: no such tile
  int tile;  // of the sequence and KV head
};

// Tile number `index` of the batch: sequences in order, the last tile of each first, since it has
// the most keys. All lanes of a warp call it.
__device__ __forceinline__ QueryTile find_query_tile(const AttentionParams& p, int group,
                                                     int tile_rows, int index) {
  const int lane = threadIdx.x % kWarpSize;
  const int num_seqs = static_cast<int>(p.num_seqs);
  int before = 0;
  for (int base = 0; base < num_seqs; base += kWarpSize) {
    const int s = base + lane;
    const int q_len = s < num_seqs ? p.q_starts[s + 1] - p.q_starts[s] : 0;
    const int tiles = (q_len * group + tile_rows - 1) / tile_rows;
    int through = tiles;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, through, offset);
      if (lane >= offset) through += other;
    }
    through += before;
    const unsigned past = __ballot_sync(kFullMask, index < through);
    if (past != 0) {
      const int owner = __ffs(static_cast<int>(past)) - 1;
      return {base + owner, __shfl_sync(kFullMask, through, owner) - 1 - index};
    }
    before = __shfl_sync(kFullMask, through, kWarpSize - 1);
  }
  return {num_seqs, 0};
}

// A sequence's new tokens, for one KV head.
struct QueryRows {
  int q_start, q_len;
  int seq_len;
  int group;  // query heads of the KV head
  int kv_head;
  int64_t num_q_heads;

  __device__ int token(int row) const { return row / group; }
  __device__ bool exists(int row) const { return token(row) < q_len; }
  // The last key that the row sees; rows past the end stand with the last token.
  __device__ int position(int row) const { return seq_len - q_len + min(token(row), q_len - 1); }
  // Offset of the row's first element in q and out.
  __device__ int64_t offset(int row, int head_dim) const {
    const int t = token(row);
    return ((q_start + t) * num_q_heads + kv_head * group + (row - t * group)) * head_dim;
  }
};

__device__ __forceinline__ QueryRows query_rows(const AttentionParams& p, int seq, int group,
                                                int kv_head) {
  const int q_start = p.q_starts[seq];
  return {q_start, p.q_starts[seq + 1] - q_start, p.seq_lens[seq], group, kv_head, p.num_q_heads};
}

// A bound for the tiles of all sequences and one KV head that holds without knowing their lengths.
inline int64_t max_query_tiles(const AttentionParams& p, int64_t group, int64_t tile_rows) {
  return p.num_tokens * group / tile_rows + p.num_seqs;
}

}  // namespace minivllm::cuda::attention
