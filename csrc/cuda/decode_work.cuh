// How decode attention shares out its work, and what happens to a split's result. The warps of a
// block each own some columns of head_dim; nothing here needs the block's other warps.
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
__device__ __forceinline__ void compute_barrier() {
  named_barrier(kCompute, kDecodeComputeThreads);
}

struct DecodeWork {
  AttentionParams p;
  float c;           // scale log2(e)
  int group;         // query heads of a KV head
  int tiles_a_head;  // head tiles of a KV head
  int head_tiles;    // of a token
  int rows;          // of a partial: query heads of a head tile, at most
  int64_t capacity;  // partials that the workspace holds
};

// A split of one (sequence, head tile); the order is sequence, head tile, split.
struct DecodeItem {
  int seq, head_tile, split;
  int num_tiles;  // of the sequence
  int first;      // index of its first tile among all

  __device__ int num_splits() const { return (num_tiles + kTilesPerSplit - 1) / kTilesPerSplit; }
  __device__ int tiles_here() const {
    return min(kTilesPerSplit, num_tiles - split * kTilesPerSplit);
  }
  __device__ bool same_row(const DecodeItem& other) const {
    return seq == other.seq && head_tile == other.head_tile;
  }
};

// counts[s]: tiles of the sequences before s.
__device__ __forceinline__ void settle(DecodeItem& item, const int* counts, int num_seqs,
                                       int head_tiles) {
  item.num_tiles = 0;
  while (item.seq < num_seqs) {
    item.num_tiles = counts[item.seq + 1] - counts[item.seq];
    if (item.num_tiles > 0) break;
    ++item.seq;
  }
  item.first =
      counts[item.seq] * head_tiles + item.head_tile * item.num_tiles + item.split * kTilesPerSplit;
}

__device__ __forceinline__ void advance(DecodeItem& item, const int* counts, int num_seqs,
                                        int head_tiles) {
  if (++item.split * kTilesPerSplit >= item.num_tiles) {
    item.split = 0;
    if (++item.head_tile == head_tiles) {
      item.head_tile = 0;
      ++item.seq;
    }
  }
  settle(item, counts, num_seqs, head_tiles);
}

// The first item whose first tile is `tile` or later.
__device__ __forceinline__ DecodeItem find_item(int tile, const int* counts, int num_seqs,
                                                int head_tiles) {
  int low = 0, high = num_seqs;  // the last s with counts[s] * head_tiles <= tile
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (counts[middle] * head_tiles <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  DecodeItem item = {low, 0, 0, 0, 0};
  if (low < num_seqs) {
    const int num_tiles = counts[low + 1] - counts[low];
    const int local = tile - counts[low] * head_tiles;
    item.head_tile = local / num_tiles;
    item.split = (local % num_tiles + kTilesPerSplit - 1) / kTilesPerSplit;
    if (item.split * kTilesPerSplit >= num_tiles) {
      item.split = 0;
      if (++item.head_tile == head_tiles) {
        item.head_tile = 0;
        ++item.seq;
      }
    }
  }
  settle(item, counts, num_seqs, head_tiles);
  return item;
}

// Tile counts of all sequences, summed over those before; returns the largest. All threads;
// scratch: two ints a warp.
template <int kThreads>
__device__ __forceinline__ int count_tiles(const AttentionParams& p, int* counts, int* scratch) {
  const int num_seqs = static_cast<int>(p.num_seqs);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int each = (num_seqs + kThreads - 1) / kThreads;
  const int begin = min(num_seqs, static_cast<int>(threadIdx.x) * each);
  const int end = min(num_seqs, begin + each);
  int sum = 0, most = 0;
  for (int s = begin; s < end; ++s) {
    const int slot = p.slots[s], length = p.seq_lens[s];
    const int tiles = slot < 0 ? 0 : (max(length, 0) + kTileTokens - 1) / kTileTokens;
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

// The run of items of one block: those whose first tile lies in [border(b), border(b + 1)). Runs
// are equal in tiles, which cuts rows; or, where that takes hardly longer or the workspace could
// not hold the cut rows, runs of whole rows.
struct Share {
  int num_seqs, head_tiles, total;
  bool cut;

  __device__ Share(const DecodeWork& w, const int* counts, int most_tiles)
      : num_seqs(static_cast<int>(w.p.num_seqs)), head_tiles(w.head_tiles) {
    constexpr int kCutCost = 9;  // what a cut row costs, in the time of tiles
    const int blocks = static_cast<int>(gridDim.x);
    total = counts[num_seqs] * head_tiles;
    const int rows_a_block = (num_seqs * head_tiles + blocks - 1) / blocks;
    const int64_t longest = static_cast<int64_t>(rows_a_block) * most_tiles;
    cut = longest > total / blocks + kCutCost &&
          counts[num_seqs] / kTilesPerSplit + num_seqs <= w.capacity / head_tiles;
  }
  __device__ int border(const int* counts, int64_t block) const {
    const int64_t units = cut ? total : num_seqs * head_tiles;
    const int unit = static_cast<int>(block * units / gridDim.x);
    if (cut) return unit;
    const int seq = unit / head_tiles;
    if (seq >= num_seqs) return total;
    return counts[seq] * head_tiles + unit % head_tiles * (counts[seq + 1] - counts[seq]);
  }
  // The block whose run holds this tile.
  __device__ int owner(int tile) const {
    return static_cast<int>(((static_cast<int64_t>(tile) + 1) * gridDim.x - 1) / total);
  }
};

// The query heads of a head tile.
struct QueryHeads {
  int first, count;

  __device__ QueryHeads(const DecodeWork& w, int head_tile) {
    const int part = head_tile % w.tiles_a_head;
    first = head_tile / w.tiles_a_head * w.group + part * kMmaRows;
    count = min(kMmaRows, w.group - part * kMmaRows);
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

// Where a split of a row lies in the workspace: m, l and o of its query heads.
template <int kHeadDim>
__device__ __forceinline__ float* partial(const DecodeWork& w, const int* counts,
                                          const DecodeItem& row, int split) {
  const int64_t slot =
      static_cast<int64_t>(counts[row.seq] / kTilesPerSplit + row.seq + split) * w.head_tiles +
      row.head_tile;
  float* partials = reinterpret_cast<float*>(static_cast<char*>(w.p.workspace) + kCounterBytes);
  return partials + slot * w.rows * (kHeadDim + 2);
}

// What a warp keeps of the row that its block works on.
template <typename T, int kHeadDim>
struct RowSoFar {
  using State = RowState<kHeadDim>;
  State total;
  bool from_start;  // the row's first split is the block's

  __device__ explicit RowSoFar(const DecodeItem& first) : from_start(first.split == 0) {}

  // Takes the result of `item`; `more`: another item of the block follows. Tells the finishing warp
  // when the block has left its part of a cut row in the workspace.
  __device__ void add(const DecodeWork& w, const int* counts, const DecodeItem& item, bool more,
                      const State& state) {
    const QueryHeads heads(w, item.head_tile);
    if (item.split == 0) {
      total = state;
    } else if (from_start) {
      total.merge(state, w.c);
    } else {
      state.store(partial<kHeadDim>(w, counts, item, item.split), heads.count);
    }
    const bool row_ends = item.split == item.num_splits() - 1;
    if (!row_ends && more) return;
    if (row_ends && from_start) {
      T* out = static_cast<T*>(w.p.out) + (item.seq * w.p.num_q_heads + heads.first) * kHeadDim;
      total.write(out, heads.count);
    } else {
      if (from_start) total.store(partial<kHeadDim>(w, counts, item, 0), heads.count);
      named_barrier(from_start ? kGoesOn : kBeganBefore, kDecodeComputeThreads + kWarpSize);
    }
    from_start = true;
  }
};

// One warp, after the block's `arrived` splits of a cut row have reached the workspace: counts
// them, and merges the row's partials in order if no split is missing.
template <typename T, int kHeadDim>
__device__ __noinline__ void finish_cut_row(const DecodeWork& w, const int* counts,
                                            const Share& share, const DecodeItem& row,
                                            int arrived) {
  constexpr int kPairs = 4;  // pairs of columns of a lane at once
  constexpr int kAhead = 4;  // partials on their way at once
  const int lane = threadIdx.x % kWarpSize;
  const int num_splits = row.num_splits();
  const int row_first = row.first - row.split * kTilesPerSplit;
  const int owner = share.owner(row_first);
  int32_t* counter = static_cast<int32_t*>(w.p.workspace) + owner;
  int before = 0;
  __syncwarp();
  if (lane == 0)
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(arrived)
                 : "memory");
  before = __shfl_sync(kFullMask, before, 0);
  __syncwarp();
  if (before + arrived != num_splits) return;
  if (lane == 0) *counter = 0;

  // The first `owned` splits lie merged in the first partial; the others follow it.
  const int owned =
      min(num_splits,
          (share.border(counts, owner + 1) - row_first + kTilesPerSplit - 1) / kTilesPerSplit);
  const int64_t step = static_cast<int64_t>(w.head_tiles) * w.rows * (kHeadDim + 2);
  const QueryHeads heads(w, row.head_tile);
  const int rows = heads.count;
  const float* first = partial<kHeadDim>(w, counts, row, 0);
  T* out = static_cast<T*>(w.p.out) + (row.seq * w.p.num_q_heads + heads.first) * kHeadDim;
  for (int base = lane; base < rows * kHeadDim / 2; base += kPairs * kWarpSize) {
    float m[kPairs], l[kPairs];
    float2 o[kPairs];
    auto load = [&](const float* from, float (&pm)[kPairs], float (&pl)[kPairs],
                    float2(&po)[kPairs]) {
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        const int pair = base + k * kWarpSize;
        if (pair >= rows * kHeadDim / 2) continue;
        pm[k] = __ldcg(from + pair / (kHeadDim / 2));
        pl[k] = __ldcg(from + rows + pair / (kHeadDim / 2));
        po[k] = __ldcg(reinterpret_cast<const float2*>(from + 2 * rows) + pair);
      }
    };
    load(first, m, l, o);
    for (int i = owned; i < num_splits; i += kAhead) {
      float split_m[kAhead][kPairs], split_l[kAhead][kPairs];
      float2 split_o[kAhead][kPairs];
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        if (i + j < num_splits) load(first + (i + j) * step, split_m[j], split_l[j], split_o[j]);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (i + j >= num_splits) continue;
#pragma unroll
        for (int k = 0; k < kPairs; ++k) {
          const Merge factors = merge_split(m[k], l[k], split_m[j][k], split_l[j][k], w.c);
          o[k].x = merge_value(factors, o[k].x, split_o[j][k].x);
          o[k].y = merge_value(factors, o[k].y, split_o[j][k].y);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kPairs; ++k) {
      const int pair = base + k * kWarpSize;
      if (pair >= rows * kHeadDim / 2) continue;
      const float inverse = inverse_sum(l[k]);
      reinterpret_cast<uint32_t*>(out)[pair] =
          pack<T>(normalise(o[k].x, inverse), normalise(o[k].y, inverse));
    }
  }
}

// One warp: sees to the rows that the block's share cuts at its two ends.
template <typename T, int kHeadDim>
__device__ __forceinline__ void finish_rows(const DecodeWork& w, const int* counts,
                                            const Share& share, const DecodeItem& first, int end) {
  const DecodeItem after = find_item(end, counts, share.num_seqs, share.head_tiles);
  const bool goes_on = after.first < share.total && after.split != 0;
  bool same = false;
  if (first.split != 0) {
    same = goes_on && after.same_row(first);
    named_barrier(kBeganBefore, kDecodeComputeThreads + kWarpSize);
    finish_cut_row<T, kHeadDim>(w, counts, share, first,
                                (same ? after.split : first.num_splits()) - first.split);
  }
  if (goes_on && !same) {
    named_barrier(kGoesOn, kDecodeComputeThreads + kWarpSize);
    finish_cut_row<T, kHeadDim>(w, counts, share, after, after.split);
  }
}

}  // namespace minivllm::cuda::attention
