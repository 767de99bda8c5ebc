// The order in which the blocks of the Hopper prefill kernel take their work, found by one warp
// from the batch's lengths: no list is stored, no counter shared.
//
// An item is a tile of query rows of one sequence and one KV head; its cost is the number of key
// tiles that it sees, its level. Sequences are taken in groups whose keys and values fit in L2;
// inside a group items go from the highest level to the lowest, and block b takes the items at b,
// then at 2 G - 1 - b, then at 2 G + b ... of G blocks: the blocks' sums come out nearly equal.
#pragma once

#include "prefill_rows.cuh"

namespace minivllm::cuda::attention {

struct PrefillWork {
  AttentionParams p;
  float c;  // scale log2(e)
  int group;
  int64_t group_tokens;  // of a group of sequences, at most (one sequence may have more)
};

// What the other warps need to know of an item.
struct alignas(16) PrefillItem {
  int q_start, q_len, seq_len, slot;
  int kv_head, first_row;
  int num_tiles;  // of keys; 0: there is no more work
  int unused;

  __device__ QueryRows rows(const PrefillWork& w) const {
    return {q_start, q_len, seq_len, w.group, kv_head, w.p.num_q_heads};
  }
};

// Held by a warp; lane i knows sequence i of the group.
template <int kTileRows>
class PrefillSchedule {
 public:
  __device__ explicit PrefillSchedule(const PrefillWork& w)
      : w_(w), heads_(static_cast<int>(w.p.kv.num_kv_heads)) {
    load_group();
  }

  // The block's next item, the same in all lanes.
  __device__ PrefillItem next() {
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    const int at = round_ * blocks + (round_ % 2 == 0 ? block : blocks - 1 - block);
    ++round_;
    while (at - base_ >= total_ * heads_) {
      base_ += total_ * heads_;
      first_seq_ += members_;
      if (first_seq_ >= w_.p.num_seqs) return {};
      load_group();
    }
    const int local = (at - base_) / heads_;
    while (local >= through_) {
      --level_;
      above_ = through_;
      through_ = static_cast<int>(__reduce_add_sync(kFullMask, at_least(level_)));
    }
    // Tiles of this level, sequence after sequence.
    const int here = at_least(level_) - at_least(level_ + 1);
    int through = here;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, through, offset);
      if (static_cast<int>(threadIdx.x % kWarpSize) >= offset) through += other;
    }
    const int rank = local - above_;
    const int owner = __ffs(static_cast<int>(__ballot_sync(kFullMask, rank < through))) - 1;
    const int tile = tiles_ - at_least(level_) + rank - (through - here);
    PrefillItem item = {};
    item.q_start = __shfl_sync(kFullMask, q_start_, owner);
    item.q_len = __shfl_sync(kFullMask, q_len_, owner);
    item.seq_len = __shfl_sync(kFullMask, seq_len_, owner);
    item.slot = __shfl_sync(kFullMask, slot_, owner);
    item.kv_head = (at - base_) % heads_;
    item.first_row = __shfl_sync(kFullMask, tile, owner) * kTileRows;
    item.num_tiles = level_;
    return item;
  }

 private:
  // Tiles of this lane's sequence that see at least `level` key tiles.
  __device__ int at_least(int level) const {
    const int token = max(0, kTileTokens * (level - 1) - (seq_len_ - q_len_));
    return token >= q_len_ ? 0 : tiles_ - token * w_.group / kTileRows;
  }

  __device__ void load_group() {
    const int lane = threadIdx.x % kWarpSize;
    const int seq = first_seq_ + lane;
    const bool inside = seq < w_.p.num_seqs;
    slot_ = inside ? w_.p.slots[seq] : -1;
    seq_len_ = inside ? w_.p.seq_lens[seq] : 0;
    q_start_ = inside ? w_.p.q_starts[seq] : 0;
    q_len_ = inside ? w_.p.q_starts[seq + 1] - q_start_ : 0;
    if (slot_ < 0 || q_len_ <= 0) q_len_ = seq_len_ = 0;
    int64_t tokens = seq_len_;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int64_t other = __shfl_up_sync(kFullMask, tokens, offset);
      if (lane >= offset) tokens += other;
    }
    const bool member = inside && (lane == 0 || tokens <= w_.group_tokens);
    members_ = __popc(__ballot_sync(kFullMask, member));
    if (!member) q_len_ = seq_len_ = 0;
    tiles_ = (q_len_ * w_.group + kTileRows - 1) / kTileRows;
    total_ = static_cast<int>(__reduce_add_sync(kFullMask, tiles_));
    level_ =
        static_cast<int>(__reduce_max_sync(kFullMask, (seq_len_ + kTileTokens - 1) / kTileTokens));
    above_ = 0;
    through_ = static_cast<int>(__reduce_add_sync(kFullMask, at_least(level_)));
  }

  const PrefillWork& w_;
  int heads_;
  int round_ = 0, base_ = 0, first_seq_ = 0;
  int members_, total_;          // sequences of the group, query tiles of it for one head
  int level_, above_, through_;  // tiles above the level, tiles at it or above
  int slot_, seq_len_, q_start_, q_len_, tiles_;  // of this lane's sequence
};

}  // namespace minivllm::cuda::attention
