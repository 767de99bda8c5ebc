// A block's share in decode attention as parts of rows, which the warps of decode_sm90.cuh take in
// turn.
#pragma once

#include "decode_work.cuh"

namespace minivllm::cuda::attention {

// A block's part of a row: splits first_split .. end_split of it.
struct RowPart {
  int seq;
  int first_split, end_split;
  int num_tiles;  // of the sequence
  int before;     // tiles of the block's parts before this one

  __device__ bool empty() const { return first_split >= end_split; }
  __device__ bool whole() const {
    return first_split == 0 && end_split * kTilesPerSplit >= num_tiles;
  }
  __device__ int tiles(int split) const {
    return min(kTilesPerSplit, num_tiles - split * kTilesPerSplit);
  }
};

// A block's share as parts of rows, some of which may be empty. All lanes of a warp make it.
struct RowParts {
  const int* counts;
  int head_tile;
  int begin, end;  // tiles, of those of all sequences
  int first_seq, count;
  int ahead;  // tiles of the last part, if it is to come first, or 0

  __device__ RowParts(const Share& share, const int* tile_counts)
      : counts(tile_counts), head_tile(share.head_tile) {
    const DecodeItem from = share.find(counts, share.run);
    const DecodeItem to = share.find(counts, share.run + 1);
    begin = from.first;
    end = to.first;
    first_seq = from.seq;
    count = to.seq + (to.split > 0 ? 1 : 0) - first_seq;
    ahead = count > 1 ? to.split * kTilesPerSplit : 0;
  }

  __device__ RowPart operator[](int index) const {
    RowPart part;
    part.seq = first_seq + index;
    if (ahead > 0) part.seq = index == 0 ? first_seq + count - 1 : part.seq - 1;
    const int first = counts[part.seq];
    part.num_tiles = counts[part.seq + 1] - first;
    part.first_split = max(0, begin - first) / kTilesPerSplit;
    part.end_split = (min(part.num_tiles, end - first) + kTilesPerSplit - 1) / kTilesPerSplit;
    part.before = ahead > 0 && index == 0 ? 0 : max(0, first - begin) + ahead;
    return part;
  }
  // The first split of a part.
  __device__ DecodeItem item(const RowPart& part) const {
    return {part.seq, head_tile, part.first_split, part.num_tiles,
            counts[part.seq] + part.first_split * kTilesPerSplit};
  }
};

}  // namespace minivllm::cuda::attention
