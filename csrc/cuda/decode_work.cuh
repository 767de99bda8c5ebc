// How decode attention shares out its work: items, the blocks' shares of them, the rows of a head
// tile.
#pragma once

#include "attention_common.cuh"

namespace minivllm::cuda::attention {

constexpr int kDecodeWarps = kTilesPerSplit;  // warp w scores tile w of a split
constexpr int kDecodeComputeThreads = kDecodeWarps * kWarpSize;
constexpr int kDecodeMaxSeqs = 1024;  // rows of one launch
constexpr int kDecodeMaxBlocks = 4096;
// The workspace starts with one counter for each block.
constexpr int64_t kCounterBytes = kDecodeMaxBlocks * sizeof(int32_t);

// Named barriers of a block: among the computing warps; with the warp that finishes cut rows, when
// the block has left its part of a row that began before its share, or of one that goes on after
// it.
enum DecodeBarrier { kCompute = 1, kBeganBefore = 2, kGoesOn = 3 };

__device__ __forceinline__ void named_barrier(int id, int threads) {
  __syncwarp();  // the barrier counts whole warps
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// Arrives without waiting: the others' named_barrier of as many threads does.
__device__ __forceinline__ void named_arrive(int id, int threads) {
  __syncwarp();
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void compute_barrier() {
  named_barrier(kCompute, kDecodeComputeThreads);
}

struct DecodeWork {
  AttentionParams p;
  float c;           // scale log2(e)
  int group;         // query heads of a KV head
  int tile_heads;    // query heads of a head tile, at most
  int tiles_a_head;  // head tiles of a KV head
  int head_tiles;    // of a token
  int rows;          // of a partial: query heads of a head tile, at most
  int64_t capacity;  // partials that the workspace holds
  int num_ctas;      // that share the work, the first of the grid
};

// A split of one (sequence, head tile).
struct DecodeItem {
  int seq, head_tile, split;
  int num_tiles;  // of the sequence
  int first;      // index of its first tile among those of all sequences

  __device__ int num_splits() const { return (num_tiles + kTilesPerSplit - 1) / kTilesPerSplit; }
  __device__ int tiles_here() const {
    return min(kTilesPerSplit, num_tiles - split * kTilesPerSplit);
  }
};

// counts[s]: tiles of the sequences before s.
__device__ __forceinline__ void settle(DecodeItem& item, const int* counts, int num_seqs) {
  item.num_tiles = 0;
  while (item.seq < num_seqs) {
    item.num_tiles = counts[item.seq + 1] - counts[item.seq];
    if (item.num_tiles > 0) break;
    ++item.seq;
  }
  item.first = counts[item.seq] + item.split * kTilesPerSplit;
}

__device__ __forceinline__ void advance(DecodeItem& item, const int* counts, int num_seqs) {
  if (++item.split * kTilesPerSplit >= item.num_tiles) {
    item.split = 0;
    ++item.seq;
  }
  settle(item, counts, num_seqs);
}

// The first item whose first tile is `tile` or later. All lanes of a warp call it.
__device__ __forceinline__ DecodeItem find_item(int tile, int head_tile, const int* counts,
                                                int num_seqs) {
  static_assert(kDecodeMaxSeqs <= kWarpSize * kWarpSize);
  DecodeItem item = {num_seqs, head_tile, 0, 0, counts[num_seqs]};
  if (tile >= item.first) return item;
  // The last s with counts[s] <= tile, in two looks at ascending numbers.
  const int lane = threadIdx.x % kWarpSize;
  item.seq = 0;
#pragma unroll
  for (int step = kWarpSize; step > 0; step /= kWarpSize) {
    const int s = item.seq + lane * step;
    const bool begun = s < num_seqs && counts[s] <= tile;
    item.seq += (__popc(__ballot_sync(kFullMask, begun)) - 1) * step;
  }
  item.split = (tile - counts[item.seq] + kTilesPerSplit - 1) / kTilesPerSplit;
  if (item.split * kTilesPerSplit >= counts[item.seq + 1] - counts[item.seq]) {
    item.split = 0;
    ++item.seq;
  }
  settle(item, counts, num_seqs);
  return item;
}

// Slot and length of a sequence.
struct DecodeSequence {
  int slot, length;
};

// Tile counts of all sequences, summed over those before; returns the largest. All threads;
// scratch: two ints a warp. Keeps what it reads of the sequences where `known` is not null.
template <int kThreads>
__device__ __forceinline__ int count_tiles(const AttentionParams& p, int* counts, int* scratch,
                                           DecodeSequence* known = nullptr) {
  const int num_seqs = static_cast<int>(p.num_seqs);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int each = (num_seqs + kThreads - 1) / kThreads;
  const int begin = min(num_seqs, static_cast<int>(threadIdx.x) * each);
  const int end = min(num_seqs, begin + each);
  int sum = 0, most = 0;
  for (int s = begin; s < end; ++s) {
    const int slot = load_settled(p.slots + s), length = load_settled(p.seq_lens + s);
    const int tiles = slot < 0 ? 0 : (max(length, 0) + kTileTokens - 1) / kTileTokens;
    if (known != nullptr) known[s] = {slot, length};
    sum += tiles;
    most = max(most, tiles);
    counts[s + 1] = sum;
  }
  int before = sum;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int other = __shfl_up_sync(kFullMask, before, offset);
    if (lane >= offset) before += other;
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    most = max(most, __shfl_xor_sync(kFullMask, most, offset));
  constexpr int kScanWarps = kThreads / kWarpSize;
  if (lane == kWarpSize - 1) {
    scratch[warp] = before;
    scratch[kScanWarps + warp] = most;
  }
  before -= sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) before += scratch[w];
  for (int s = begin; s < end; ++s) counts[s + 1] += before;
#pragma unroll
  for (int w = 0; w < kScanWarps; ++w) most = max(most, scratch[kScanWarps + w]);
  if (threadIdx.x == 0) counts[0] = 0;
  __syncthreads();
  return most;
}

// What a block works on: one head tile, and a run of its items. Blocks that follow each other have
// the same run of different head tiles: what they read at one time lies together in the cache,
// which the device's memory likes. A run is the items whose first tile lies in [border(g),
// border(g + 1)). Runs are equal in tiles, which cuts rows; or, where that takes hardly longer or
// the workspace could not hold the cut rows, runs of whole rows.
struct Share {
  int num_seqs, total;  // sequences, and tiles of all of them
  int head_tile;
  int run, runs;  // this block's, and how many there are
  bool cut;

  __device__ Share(const DecodeWork& w, const int* counts, int most_tiles)
      : num_seqs(static_cast<int>(w.p.num_seqs)), total(counts[num_seqs]) {
    constexpr int kCutCost = 9;  // what a cut row costs, in the time of tiles
    run = static_cast<int>(blockIdx.x) / w.head_tiles;
    runs = w.num_ctas / w.head_tiles;
    head_tile = static_cast<int>(blockIdx.x) - run * w.head_tiles;
    const int longest = (num_seqs + runs - 1) / runs * most_tiles;
    cut = longest > total / runs + kCutCost &&
          total / kTilesPerSplit + num_seqs <= w.capacity / w.head_tiles;
  }
  __device__ int border(const int* counts, int index) const {
    const int units = cut ? total : num_seqs;
    const int each = units / runs;
    const int unit = index * each + min(index, units - each * runs);
    return cut ? unit : counts[min(unit, num_seqs)];
  }
  // The run that holds this tile, where rows are cut.
  __device__ int owner(int tile) const {
    const int each = total / runs, more = total - each * runs;  // the first runs have one more
    const int in_first = more * (each + 1);
    return tile < in_first ? tile / (each + 1) : more + (tile - in_first) / each;
  }
  __device__ DecodeItem find(const int* counts, int index) const {
    return find_item(border(counts, index), head_tile, counts, num_seqs);
  }
};

// The blocks of a grid of at most `blocks`, where that is possible: as many runs of every head
// tile. Up to head_tiles - 1 blocks are left out, none for 8 or 12 head tiles on an H200.
inline int64_t decode_grid(int64_t blocks, int64_t head_tiles) {
  return blocks < head_tiles ? head_tiles : blocks / head_tiles * head_tiles;
}

// The query heads of a head tile.
struct QueryHeads {
  int first, count;

  __device__ QueryHeads(const DecodeWork& w, int head_tile) {
    const int part = head_tile % w.tiles_a_head;
    first = head_tile / w.tiles_a_head * w.group + part * w.tile_heads;
    count = min(w.tile_heads, w.group - part * w.tile_heads);
  }
};

// Rows lane / 4 + 8 h of a product, for the columns 8 (kDecodeWarps b + warp) + 2 (lane % 4).
template <int kHeadDim>
struct RowState {
  static constexpr int kBlocks = (kHeadDim / 8 + kDecodeWarps - 1) / kDecodeWarps;
  float m[2], l[2];
  float o[kBlocks][4];

  __device__ static int column(int b) {
    const int warp = threadIdx.x / kWarpSize;
    return 8 * (kDecodeWarps * b + warp) + 2 * (threadIdx.x % 4);
  }
  __device__ static int row(int h) { return threadIdx.x % kWarpSize / 4 + 8 * h; }

  __device__ void merge(const RowState& split, float c) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Merge factors = merge_split(m[h], l[h], split.m[h], split.l[h], c);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
#pragma unroll
        for (int e = 2 * h; e < 2 * h + 2; ++e)
          o[b][e] = merge_value(factors, o[b][e], split.o[b][e]);
    }
  }

  // A partial is m, l and o of `rows` rows.
  __device__ void store(float* to, int rows) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row(h);
      if (r >= rows) continue;
      __stcg(to + r, m[h]);  // every lane and warp writes the same
      __stcg(to + rows + r, l[h]);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        if (column(b) < kHeadDim)
          __stcg(reinterpret_cast<float2*>(to + 2 * rows + r * kHeadDim + column(b)),
                 make_float2(o[b][2 * h], o[b][2 * h + 1]));
    }
  }
  template <typename T>
  __device__ void write(T* out, int rows) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int r = row(h);
      if (r >= rows) continue;
      const float inverse = inverse_sum(l[h]);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        if (column(b) < kHeadDim)
          *reinterpret_cast<uint32_t*>(out + r * kHeadDim + column(b)) =
              pack<T>(normalise(o[b][2 * h], inverse), normalise(o[b][2 * h + 1], inverse));
    }
  }
};

}  // namespace minivllm::cuda::attention
