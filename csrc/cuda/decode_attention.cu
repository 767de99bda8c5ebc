// Attention of one new token a sequence over its blocks: bound by reading keys and values once.
//
// The query heads of one KV head are the rows of an m16 product (16 a head tile), so keys and
// values are read once for all of them. The unit of work is a split of 256 keys of one (sequence,
// head tile); block = 4 warps, warp w works on tile w of the split:
//   scores of its tile -> maxima of all tiles through shared memory -> probabilities of its tile
//   -> through shared memory -> values of all tiles for a quarter of head_dim
// which is the arithmetic of attention_common.cuh, tile after tile, with the tiles' scores computed
// side by side. Keys and values of a split arrive by cp.async in a ring of units (256 keys or 256
// values); each warp fetches the rows that it addresses itself through the block table.
//
// The grid is fixed; every block finds its share of the work from seq_lens: an equal run of tiles,
// so ragged lengths balance. Splits of one row that fall in one block merge in registers; a row cut
// by a border of two shares leaves its splits in the workspace, and the block that arrives last
// merges them in order. Where the borders fall changes no bit.
// https://arxiv.org/abs/2205.14135, https://arxiv.org/abs/2309.06180
#include <algorithm>

#include "attention_common.cuh"
#include "attention_host.cuh"

namespace minivllm::cuda {
namespace {

using namespace attention;

constexpr int kWarps = kTilesPerSplit;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kMaxSeqs = 1024;    // rows of one launch
constexpr int kMaxBlocks = 4096;  // one counter each at the workspace's start
constexpr int64_t kCounterBytes = kMaxBlocks * sizeof(int32_t);
constexpr int64_t kMaxPartialBytes = int64_t{32} << 20;
constexpr int kSmemPerSm = 227 * 1024;
constexpr int kSmemReserved = 1024;  // of each block, by the hardware

// Shared memory, in order: ring, probabilities, maxima, sums, scratch, tile counts.
template <int kHeadDim, int kUnits>
struct Layout {
  static constexpr int kTileBytes = kTileTokens * kHeadDim * 2;
  static constexpr int kUnitBytes = kTilesPerSplit * kTileBytes;
  static constexpr int kProbabilities = kUnits * kUnitBytes;
  static constexpr int kMaxima = kProbabilities + kMmaRows * kSplitTokens * 2;
  static constexpr int kSums = kMaxima + kTilesPerSplit * kMmaRows * 4;
  static constexpr int kScratch = kSums + kThreads * 8;
  static constexpr int kCounts = kScratch + 32;
  static constexpr int bytes(int64_t num_seqs) {
    return kCounts + static_cast<int>(num_seqs + 1) * 4;
  }
  static constexpr int kBlocksPerSm = [] {
    const int fit = kSmemPerSm / (bytes(kMaxSeqs / 2) + kSmemReserved);
    return fit < 1 ? 1 : fit > 3 ? 3 : fit;
  }();
};

struct Work {
  AttentionParams p;
  float c;           // scale log2(e)
  int group;         // query heads of a KV head
  int tiles_a_head;  // head tiles of a KV head
  int head_tiles;    // of a token
  int rows;          // of a partial: query heads of a head tile, at most
  int64_t capacity;  // partials that the workspace holds
};

// A split of one (sequence, head tile); the order is sequence, head tile, split.
struct Item {
  int seq, head_tile, split;
  int num_tiles;  // of the sequence
  int first;      // index of its first tile among all

  __device__ int num_splits() const { return (num_tiles + kTilesPerSplit - 1) / kTilesPerSplit; }
  __device__ int tiles_here() const {
    return min(kTilesPerSplit, num_tiles - split * kTilesPerSplit);
  }
  __device__ bool same_row(const Item& other) const {
    return seq == other.seq && head_tile == other.head_tile;
  }
};

// counts[s]: tiles of the sequences before s.
__device__ __forceinline__ void settle(Item& item, const int* counts, int num_seqs,
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

__device__ __forceinline__ void advance(Item& item, const int* counts, int num_seqs,
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
__device__ __forceinline__ Item find_item(int tile, const int* counts, int num_seqs,
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
  Item item = {low, 0, 0, 0, 0};
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

// Tile counts of all sequences, summed over those before.
__device__ __forceinline__ void count_tiles(const AttentionParams& p, int* counts, int* scratch) {
  const int num_seqs = static_cast<int>(p.num_seqs);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int each = (num_seqs + kThreads - 1) / kThreads;
  const int begin = min(num_seqs, static_cast<int>(threadIdx.x) * each);
  const int end = min(num_seqs, begin + each);
  int sum = 0;
  for (int s = begin; s < end; ++s) {
    const int slot = p.slots[s], length = p.seq_lens[s];
    const int tiles = slot < 0 ? 0 : (max(length, 0) + kTileTokens - 1) / kTileTokens;
    sum += tiles;
    counts[s + 1] = sum;
  }
  int before = sum;
#pragma unroll
  for (int offset = 1; offset < kWarpSize; offset *= 2) {
    const int other = __shfl_up_sync(kFullMask, before, offset);
    if (lane >= offset) before += other;
  }
  if (lane == kWarpSize - 1) scratch[warp] = before;
  before -= sum;
  __syncthreads();
  for (int w = 0; w < warp; ++w) before += scratch[w];
  for (int s = begin; s < end; ++s) counts[s + 1] += before;
  if (threadIdx.x == 0) counts[0] = 0;
  __syncthreads();
}

// What a warp needs to fetch its tile of a split: lane i addresses rows i and i + 32.
struct Fetch {
  Item item;
  int valid;         // rows of the tile that exist
  int32_t block[2];  // table entries, read half a split before they are used
  uint32_t offset[2];
  uint32_t row[2];
  bool values;  // the next unit holds the split's values
};

template <typename T, int kHeadDim>
__device__ __forceinline__ void fetch_tile(uint32_t destination, const T* cache, const Fetch& f,
                                           uint32_t shift) {
  constexpr int kPieces = kHeadDim / 8;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < kTileTokens * kPieces / kWarpSize; ++i) {
    const int index = i * kWarpSize + lane;
    const int row = index / kPieces, piece = index % kPieces;
    uint32_t source;
    if constexpr (kWarpSize % kPieces == 0) {
      source = __shfl_sync(kFullMask, f.row[i * (kWarpSize / kPieces) / kWarpSize], row);
    } else {
      const uint32_t low = __shfl_sync(kFullMask, f.row[0], row);
      const uint32_t high = __shfl_sync(kFullMask, f.row[1], row);
      source = row < kWarpSize ? low : high;
    }
    const bool exists = row < f.valid;
    copy_async(destination + tile_offset<kHeadDim>(row, piece),
               cache + static_cast<uint64_t>(exists ? source + shift : 0) * kHeadDim + piece * 8,
               exists);
  }
}

template <int kBlocks>
struct RowState {
  float m[2], l[2];
  float o[kBlocks][4];
};

// m, l and o of one split (or of the first few) of a head tile, for the merge.
__device__ __forceinline__ float* partial(const Work& w, const int* counts, int seq, int head_tile,
                                          int split, int head_dim) {
  const int64_t slot =
      static_cast<int64_t>(counts[seq] / kTilesPerSplit + seq + split) * w.head_tiles + head_tile;
  float* partials = reinterpret_cast<float*>(static_cast<char*>(w.p.workspace) + kCounterBytes);
  return partials + slot * w.rows * (head_dim + 2);
}

template <int kHeadDim, int kBlocks>
__device__ __forceinline__ void store_partial(float* to, int rows, const RowState<kBlocks>& s) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int r = lane / 4 + 8 * h;
    if (r >= rows) continue;
    if (warp == 0 && lane % 4 == 0) {
      __stcg(to + r, s.m[h]);
      __stcg(to + rows + r, s.l[h]);
    }
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) {
      const int column = 8 * (kWarps * b + warp) + 2 * (lane % 4);
      if (column < kHeadDim)
        __stcg(reinterpret_cast<float2*>(to + 2 * rows + r * kHeadDim + column),
               make_float2(s.o[b][2 * h], s.o[b][2 * h + 1]));
    }
  }
}

template <typename T, int kHeadDim, int kUnits>
__global__ void __launch_bounds__(kThreads, (Layout<kHeadDim, kUnits>::kBlocksPerSm))
    decode_attention_kernel(const __grid_constant__ Work w) {
  using L = Layout<kHeadDim, kUnits>;
  constexpr int kBlocks = (kHeadDim / 8 + kWarps - 1) / kWarps;  // column blocks of a warp's o
  const AttentionParams& p = w.p;
  const KvCache& kv = p.kv;
  pdl_launch_dependents();
  pdl_wait();

  extern __shared__ __align__(128) uint8_t smem[];
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  uint4* probabilities = reinterpret_cast<uint4*>(smem + L::kProbabilities);  // [tile][step][lane]
  float* maxima = reinterpret_cast<float*>(smem + L::kMaxima);                // [tile][row]
  float2* sums = reinterpret_cast<float2*>(smem + L::kSums);                  // [tile][lane]
  int* scratch = reinterpret_cast<int*>(smem + L::kScratch);
  int* counts = reinterpret_cast<int*>(smem + L::kCounts);

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_seqs = static_cast<int>(p.num_seqs);
  const T* cache = static_cast<const T*>(kv.cache);
  count_tiles(p, counts, scratch);

  // This block's share: items whose first tile lies in [begin, end). Too many for the workspace: no
  // row is cut, a share is a run of whole rows.
  const int64_t total = static_cast<int64_t>(counts[num_seqs]) * w.head_tiles;
  const bool cut = counts[num_seqs] / kTilesPerSplit + num_seqs <= w.capacity / w.head_tiles;
  const int64_t units = cut ? total : static_cast<int64_t>(num_seqs) * w.head_tiles;
  auto border = [&](int64_t block) {
    const int64_t unit = block * units / gridDim.x;
    if (cut) return static_cast<int>(unit);
    const int seq = static_cast<int>(unit / w.head_tiles);
    if (seq >= num_seqs) return static_cast<int>(total);
    return counts[seq] * w.head_tiles +
           static_cast<int>(unit % w.head_tiles) * (counts[seq + 1] - counts[seq]);
  };
  const int end = border(blockIdx.x + 1);
  Item item = find_item(border(blockIdx.x), counts, num_seqs, w.head_tiles);
  if (item.first >= end) return;

  Fetch f;
  f.item = item;
  f.values = false;
  auto look_up = [&] {  // table entries of the tile to fetch next
    f.valid = 0;
    f.block[0] = f.block[1] = 0;
    f.offset[0] = f.offset[1] = 0;
    if (f.item.first >= end) return;
    const int start = f.item.split * kSplitTokens + warp * kTileTokens;
    f.valid = min(kTileTokens, p.seq_lens[f.item.seq] - start);
    const int32_t* table = kv.block_table + p.slots[f.item.seq] * kv.block_table_stride;
    const unsigned block_size = static_cast<unsigned>(kv.block_size);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane + i * kWarpSize;
      if (r >= f.valid) continue;
      const unsigned index = static_cast<unsigned>(start + r) / block_size;
      f.offset[i] = static_cast<unsigned>(start + r) - index * block_size;
      f.block[i] = table[index];
    }
  };
  uint32_t unit_at = ring + warp * L::kTileBytes;
  const uint32_t ring_end = ring + kUnits * L::kUnitBytes;
  auto fetch_unit = [&] {
    if (f.item.first < end) {
      const uint32_t heads = static_cast<uint32_t>(kv.num_kv_heads);
      const uint32_t block_size = static_cast<uint32_t>(kv.block_size);
      if (!f.values) {
        const uint32_t head = f.item.head_tile / w.tiles_a_head;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          f.row[i] =
              (static_cast<uint32_t>(f.block[i]) * 2 * heads + head) * block_size + f.offset[i];
      }
      if (f.valid > 0)
        fetch_tile<T, kHeadDim>(unit_at, cache, f, f.values ? heads * block_size : 0);
      if (f.values) {
        advance(f.item, counts, num_seqs, w.head_tiles);
        look_up();
      }
      f.values = !f.values;
    }
    commit_copies();
    unit_at += L::kUnitBytes;
    if (unit_at >= ring_end) unit_at -= kUnits * L::kUnitBytes;
  };

  uint32_t q[kHeadDim / kMmaDepth][4];
  int rows = 0, first_head = 0;  // query heads of the head tile
  auto load_q = [&](const Item& at) {
    const int kv_head = at.head_tile / w.tiles_a_head, part = at.head_tile % w.tiles_a_head;
    first_head = kv_head * w.group + part * kMmaRows;
    rows = min(kMmaRows, w.group - part * kMmaRows);
    const T* base = static_cast<const T*>(p.q) + (at.seq * p.num_q_heads + first_head) * kHeadDim;
    const int r = lane / 4;
    load_queries<T, kHeadDim>(q, r < rows ? base + r * kHeadDim : nullptr,
                              r + 8 < rows ? base + (r + 8) * kHeadDim : nullptr);
  };

  look_up();
#pragma unroll
  for (int u = 0; u < kUnits; ++u) fetch_unit();
  load_q(item);
  int length = p.seq_lens[item.seq];

  RowState<kBlocks> total_state;
  int arrived = 0;                    // splits of the row that this block has stored
  bool from_start = item.split == 0;  // this block has the row's first split
  uint32_t read_at = ring;
  auto next_unit = [&] {
    read_at += L::kUnitBytes;
    if (read_at >= ring_end) read_at = ring;
  };

  while (item.first < end) {
    const int tiles = item.tiles_here();
    const int start = item.split * kSplitTokens;
    const int rows_now = rows, first_head_now = first_head;
    Item next = item;
    advance(next, counts, num_seqs, w.head_tiles);
    const bool more = next.first < end;

    // Scores of this warp's tile.
    float s[kScores];
    wait_copies<kUnits - 1>();
    __syncwarp();
    if (warp < tiles) {
      score_tile<T, kHeadDim>(s, q, read_at + warp * L::kTileBytes);
      const int last = length - 1 - start - warp * kTileTokens;
      if (last < kTileTokens - 1) mask_scores(s, last, last);
      const float top0 = max_score<0>(s), top1 = max_score<1>(s);
      if (lane % 4 == 0) {
        maxima[warp * kMmaRows + lane / 4] = top0;
        maxima[warp * kMmaRows + lane / 4 + 8] = top1;
      }
    }
    __syncwarp();  // the tile of keys has been read, its place can be filled
    next_unit();
    fetch_unit();
    if (more) {
      if (!next.same_row(item)) load_q(next);
      if (next.seq != item.seq) length = p.seq_lens[next.seq];
    }
    __syncthreads();

    // Probabilities of this warp's tile; the running maximum over the tiles, for all of them.
    RowState<kBlocks> state;
    float factor[kTilesPerSplit][2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float m = -INFINITY, shift = 0.f, own_shift = 0.f;
#pragma unroll
      for (int t = 0; t < kTilesPerSplit; ++t) {
        if (t >= tiles) break;
        const float before = m;
        m = fmaxf(m, maxima[t * kMmaRows + lane / 4 + 8 * h]);
        shift = exponent_shift(m, w.c);
        factor[t][h] = rescale_factor(before, w.c, shift);
        if (t == warp) own_shift = shift;
      }
      state.m[h] = m;
      if (warp < tiles) {
        const float part =
            h == 0 ? exponentiate<0>(s, w.c, own_shift) : exponentiate<1>(s, w.c, own_shift);
        (h == 0 ? sums[warp * kWarpSize + lane].x : sums[warp * kWarpSize + lane].y) = part;
      }
    }
    if (warp < tiles) {
#pragma unroll
      for (int k = 0; k < kTileSteps; ++k) {
        uint32_t a[4];
        probability_operand<T>(a, s, k);
        probabilities[(warp * kTileSteps + k) * kWarpSize + lane] =
            make_uint4(a[0], a[1], a[2], a[3]);
      }
    }
    wait_copies<kUnits - 1>();
    __syncthreads();

    // Values of all tiles for this warp's columns.
    state.l[0] = state.l[1] = 0.f;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
#pragma unroll
      for (int i = 0; i < 4; ++i) state.o[b][i] = 0.f;
#pragma unroll
    for (int t = 0; t < kTilesPerSplit; ++t) {
      if (t >= tiles) break;
      const float2 sum = sums[t * kWarpSize + lane];
      state.l[0] = add_tile(state.l[0], factor[t][0], sum.x);
      state.l[1] = add_tile(state.l[1], factor[t][1], sum.y);
      uint32_t a[kTileSteps][4];
#pragma unroll
      for (int k = 0; k < kTileSteps; ++k) {
        const uint4 word = probabilities[(t * kTileSteps + k) * kWarpSize + lane];
        a[k][0] = word.x, a[k][1] = word.y, a[k][2] = word.z, a[k][3] = word.w;
      }
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[b][i] = __fmul_rn(state.o[b][i], factor[t][i / 2]);
        const int piece = kWarps * b + warp;
        if (kHeadDim / 8 % kWarps == 0 || piece < kHeadDim / 8) {
#pragma unroll
          for (int k = 0; k < kTileSteps; k += 2)
            value_steps<T, kHeadDim>(state.o[b], a[k], a[k + 1], read_at + t * L::kTileBytes, k,
                                     piece);
        }
      }
    }
    state.l[0] = quad_sum(state.l[0]);
    state.l[1] = quad_sum(state.l[1]);
    __syncthreads();  // values, probabilities, maxima have been read
    next_unit();
    fetch_unit();

    // The row so far.
    if (item.split == 0) {
      total_state = state;
    } else if (from_start) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const Merge merge =
            merge_split(total_state.m[h], total_state.l[h], state.m[h], state.l[h], w.c);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            total_state.o[b][2 * h + e] =
                merge_value(merge, total_state.o[b][2 * h + e], state.o[b][2 * h + e]);
      }
    } else {
      store_partial<kHeadDim>(partial(w, counts, item.seq, item.head_tile, item.split, kHeadDim),
                              rows_now, state);
    }
    ++arrived;

    const int num_splits = item.num_splits();
    const bool row_ends = item.split == num_splits - 1;
    T* out = static_cast<T*>(p.out) + (item.seq * p.num_q_heads + first_head_now) * kHeadDim;
    if (row_ends && from_start) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int r = lane / 4 + 8 * h;
        if (r >= rows_now) continue;
        const float inverse = inverse_sum(total_state.l[h]);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const int column = 8 * (kWarps * b + warp) + 2 * (lane % 4);
          if (column < kHeadDim)
            *reinterpret_cast<uint32_t*>(out + r * kHeadDim + column) =
                pack<T>(normalise(total_state.o[b][2 * h], inverse),
                        normalise(total_state.o[b][2 * h + 1], inverse));
        }
      }
    } else if (row_ends || !more) {
      // The row is cut: leave what is here, and merge if every other block has done so.
      if (from_start)
        store_partial<kHeadDim>(partial(w, counts, item.seq, item.head_tile, 0, kHeadDim), rows_now,
                                total_state);
      const int row_first = item.first - item.split * kTilesPerSplit;
      const int64_t owner = ((static_cast<int64_t>(row_first) + 1) * gridDim.x - 1) / total;
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) {
        int32_t* counter = static_cast<int32_t*>(p.workspace) + owner;
        const bool last = atomicAdd(counter, arrived) + arrived == num_splits;
        if (last) *counter = 0;
        __threadfence();
        scratch[0] = last;
      }
      __syncthreads();
      if (scratch[0]) {
        const int owned =
            min(num_splits, (border(owner + 1) - row_first + kTilesPerSplit - 1) / kTilesPerSplit);
        constexpr int kAhead = 4;
        const int64_t step = static_cast<int64_t>(w.head_tiles) * w.rows * (kHeadDim + 2);
        const float* first = partial(w, counts, item.seq, item.head_tile, 0, kHeadDim);
        for (int e = threadIdx.x; e < rows_now * kHeadDim / 2; e += kThreads) {
          const int r = e / (kHeadDim / 2), at = 2 * rows_now + 2 * e;
          float m = __ldcg(first + r), l = __ldcg(first + rows_now + r);
          float2 o = __ldcg(reinterpret_cast<const float2*>(first + at));
          for (int i = owned; i < num_splits; i += kAhead) {
            float split_m[kAhead], split_l[kAhead];
            float2 split_o[kAhead];
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
              if (i + j >= num_splits) break;
              const float* from = first + (i + j) * step;
              split_m[j] = __ldcg(from + r);
              split_l[j] = __ldcg(from + rows_now + r);
              split_o[j] = __ldcg(reinterpret_cast<const float2*>(from + at));
            }
#pragma unroll
            for (int j = 0; j < kAhead; ++j) {
              if (i + j >= num_splits) break;
              const Merge merge = merge_split(m, l, split_m[j], split_l[j], w.c);
              o.x = merge_value(merge, o.x, split_o[j].x);
              o.y = merge_value(merge, o.y, split_o[j].y);
            }
          }
          const float inverse = inverse_sum(l);
          *reinterpret_cast<uint32_t*>(out + 2 * e) =
              pack<T>(normalise(o.x, inverse), normalise(o.y, inverse));
        }
      }
      __syncthreads();
    }
    if (row_ends) {
      arrived = 0;
      from_start = true;
    }
    item = next;
  }
}

int64_t partial_bytes(int64_t num_seqs, int64_t max_seq_len, int64_t num_q_heads,
                      int64_t head_dim) {
  const int64_t splits = (max_seq_len + kSplitTokens - 1) / kSplitTokens + 1;
  const int64_t bytes = num_seqs * splits * num_q_heads * (head_dim + 2) * 4;
  return bytes < kMaxPartialBytes ? bytes : kMaxPartialBytes;
}

template <typename T, int kHeadDim, int kUnits>
void launch_decode(const AttentionParams& p, Stream stream) {
  using L = Layout<kHeadDim, kUnits>;
  Work w = {};
  w.p = p;
  w.c = p.scale * kLog2e;
  w.group = static_cast<int>(p.num_q_heads / p.kv.num_kv_heads);
  w.tiles_a_head = (w.group + kMmaRows - 1) / kMmaRows;
  w.head_tiles = static_cast<int>(p.kv.num_kv_heads) * w.tiles_a_head;
  w.rows = w.group < kMmaRows ? w.group : kMmaRows;
  w.capacity = partial_bytes(p.num_seqs, p.max_seq_len, p.num_q_heads, kHeadDim) /
               (w.rows * (kHeadDim + 2) * 4);
  const int64_t splits = (p.max_seq_len + kSplitTokens - 1) / kSplitTokens;
  int64_t grid = static_cast<int64_t>(num_sms()) * L::kBlocksPerSm;
  grid = std::min<int64_t>({grid, p.num_seqs * w.head_tiles * splits, kMaxBlocks});
  MINIVLLM_LAUNCH(decode_attention_kernel<T, kHeadDim, kUnits>,
                  dim3(static_cast<unsigned>(std::max<int64_t>(grid, 1))), dim3(kThreads),
                  L::bytes(p.num_seqs), stream, w);
}

}  // namespace

int64_t attention_workspace_size(int64_t max_seqs, int64_t max_seq_len, int64_t num_q_heads,
                                 int64_t head_dim) {
  return kCounterBytes + partial_bytes(max_seqs, max_seq_len, num_q_heads, head_dim);
}

void decode_attention(const AttentionParams& p, Stream stream) {
  if (p.num_seqs == 0) return;
  attention::check_attention(p);
  if (p.dtype == DType::kFloat32) return attention::launch_simt_attention(p, stream);
  for (int64_t from = 0; from < p.num_seqs; from += kMaxSeqs) {
    AttentionParams part = p;
    const int64_t elements = from * p.num_q_heads * p.kv.head_dim;
    part.num_seqs = part.num_tokens = std::min<int64_t>(kMaxSeqs, p.num_seqs - from);
    part.slots += from;
    part.seq_lens += from;
    part.q = static_cast<const uint16_t*>(p.q) + elements;
    part.out = static_cast<uint16_t*>(p.out) + elements;
    dispatch_dtype(p.dtype, [&](auto element) {
      using T = decltype(element);
      if constexpr (sizeof(T) == 2) {
        attention::dispatch_head_dim(p.kv.head_dim, [&](auto head_dim) {
          // Three units where shared memory has room for them.
          if (compute_capability() == 90 || compute_capability() == 100) {
            launch_decode<T, decltype(head_dim)::value, 3>(part, stream);
          } else {
            launch_decode<T, decltype(head_dim)::value, 2>(part, stream);
          }
        });
      }
    });
  }
}

}  // namespace minivllm::cuda
