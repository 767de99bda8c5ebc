// A block's share in decode attention as parts of rows, which the warps of decode_sm90.cuh take in
// turn.
#pragma once

#include "decode_work.cuh"

namespace minivllm::cuda::attention {

// A block's part of a row: splits first_split .. end_split of it.
struct RowPart {
  int seq, head_tile;
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
  int head_tiles;
  int begin, end;  // tiles, of all
  int first_row, count;
  int ahead;  // tiles of the last part, if it is to come first, or 0

  __device__ RowParts(const Share& share, const int* tile_counts)
      : counts(tile_counts), head_tiles(share.head_tiles) {
    const int block = static_cast<int>(blockIdx.x);
    const DecodeItem from =
        find_item(share.border(counts, block), counts, share.num_seqs, head_tiles);
    const DecodeItem to =
        find_item(share.border(counts, block + 1), counts, share.num_seqs, head_tiles);
    begin = from.first;
    end = to.first;
    first_row = from.seq * head_tiles + from.head_tile;
    count = to.seq * head_tiles + to.head_tile + (to.split > 0 ? 1 : 0) - first_row;
    ahead = count > 1 ? to.split * kTilesPerSplit : 0;
  }

  __device__ RowPart operator[](int index) const {
    int row = first_row + index;
    if (ahead > 0) row = index == 0 ? first_row + count - 1 : row - 1;
    RowPart part;
    part.seq = row / head_tiles;
    part.head_tile = row - part.seq * head_tiles;
    part.num_tiles = counts[part.seq + 1] - counts[part.seq];
    const int first = counts[part.seq] * head_tiles + part.head_tile * part.num_tiles;
    part.first_split = max(0, begin - first) / kTilesPerSplit;
    part.end_split = (min(part.num_tiles, end - first) + kTilesPerSplit - 1) / kTilesPerSplit;
    part.before = ahead > 0 && index == 0 ? 0 : max(0, first - begin) + ahead;
    return part;
  }
  // The first split of a part.
  __device__ DecodeItem item(const RowPart& part) const {
    return {part.seq, part.head_tile, part.first_split, part.num_tiles,
            counts[part.seq] * head_tiles + part.head_tile * part.num_tiles +
                part.first_split * kTilesPerSplit};
  }
};

}  // namespace minivllm::cuda::attention
