// Decode attention for Hopper: the split of decode_split.cuh, fed by TMA. Block = four warps that
// compute, one that copies tiles of 64 keys or values into a ring, a tile a place, and one that
// finishes rows which the block's share cuts, so that nobody else waits for the device's memory.
// The places free up one by one, so a block always has most of its ring on the way, and several
// blocks share an SM so that one's arithmetic hides behind another's wait.
#pragma once

#include <algorithm>

#include "attention_host.cuh"
#include "decode_finish.cuh"
#include "decode_split.cuh"
#include "sm90.cuh"

namespace minivllm::cuda::attention {

constexpr int kDecodeSm90Threads = kDecodeComputeThreads + 2 * kWarpSize;
constexpr int kMinBox = 8;  // rows of the smallest copy: a swizzle atom

constexpr bool has_decode_sm90(int head_dim) { return head_dim == 64 || head_dim == 128; }

inline bool decode_sm90_supported(const AttentionParams& p) {
  const int64_t size = p.kv.block_size;
  const bool boxes = size % kTileTokens == 0 || size == 8 || size == 16 || size == 32;
  constexpr int64_t kMaxCoordinate = int64_t{1} << 31;
  return compute_capability() == 90 && boxes &&
         p.kv.num_blocks * 2 * p.kv.num_kv_heads * size < kMaxCoordinate;
}

// Shared memory, in order: ring, exchange, barriers (full and empty of each place), scratch,
// counts.
template <int kHeadDim, int kPlaces>
struct DecodeSm90Layout {
  static constexpr int kPanelBytes = kTileTokens * sm90::kSwizzleRow;
  static constexpr int kPanels = kHeadDim * 2 / sm90::kSwizzleRow;
  static constexpr int kTileBytes = kPanels * kPanelBytes;
  static constexpr int kExchange = kPlaces * kTileBytes;
  static constexpr int kBarriers = kExchange + SplitExchange::kBytes;
  static constexpr int kScratch = kBarriers + kPlaces * 16;
  static constexpr int kCounts = kScratch + 64;
  static constexpr int bytes(int64_t num_seqs) {
    return kCounts + static_cast<int>(num_seqs + 1) * 4 + sm90::kSwizzleAtom;
  }
};

struct DecodeSm90Work {
  DecodeWork w;
  CUtensorMap map;  // the cache as [head_dim / 64][rows][64]
};

#ifdef MINIVLLM_SM90A

__device__ __forceinline__ void mbarrier_arrive_many(uint32_t barrier, int count) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}
// Copies the tiles of the block's items, keys then values of each. Lane i looks up piece i of a
// split in the block table, an item ahead.
template <int kHeadDim, int kPlaces>
__device__ __forceinline__ void fetch_items(const DecodeSm90Work& work, const int* counts,
                                            DecodeItem item, int end, uint32_t ring,
                                            uint32_t barriers) {
  using L = DecodeSm90Layout<kHeadDim, kPlaces>;
  const DecodeWork& w = work.w;
  const KvCache& kv = w.p.kv;
  const int lane = threadIdx.x % kWarpSize;
  const int heads = static_cast<int>(kv.num_kv_heads);
  const int block_size = static_cast<int>(kv.block_size);
  const int box = min(block_size, kTileTokens), boxes_a_tile = kTileTokens / box;
  const int num_seqs = static_cast<int>(w.p.num_seqs);
  const uint64_t policy = sm90::evict_first_policy();
  auto look_up = [&](const DecodeItem& at) {  // the table's entry for this lane's piece, or -1
    if (at.first >= end) return -1;
    const int position = at.split * kSplitTokens + lane * box;
    const bool inside = lane < kTilesPerSplit * boxes_a_tile && position < w.p.seq_lens[at.seq];
    if (!inside) return -1;
    return kv.block_table[w.p.slots[at.seq] * kv.block_table_stride + position / block_size];
  };
  int place = 0;
  uint32_t phase = 1;  // places start empty
  int block = look_up(item);
  while (item.first < end) {
    DecodeItem next = item;
    advance(next, counts, num_seqs, w.head_tiles);
    const int next_block = look_up(next);
    const int tiles = item.tiles_here();
    const unsigned inside = __ballot_sync(kFullMask, block >= 0);
    const int position = item.split * kSplitTokens + lane * box;
    const int row =
        (block * 2 * heads + item.head_tile / w.tiles_a_head) * block_size + position % block_size;
    for (int part = 0; part < 2; ++part) {  // keys, values
      for (int t = 0; t < tiles; ++t) {
        const uint32_t full = barriers + place * 16;
        sm90::mbarrier_wait(full + 8, phase);
        const int first = t * boxes_a_tile;
        const unsigned mine = (boxes_a_tile == kWarpSize ? kFullMask : (1u << boxes_a_tile) - 1)
                              << first;
        if (lane == 0)
          sm90::mbarrier_expect(full, __popc(inside & mine) * box * sm90::kSwizzleRow * L::kPanels);
        __syncwarp();
        if ((inside & mine) >> lane & 1) {
          const uint32_t to =
              ring + place * L::kTileBytes + (lane - first) * box * sm90::kSwizzleRow;
#pragma unroll
          for (int panel = 0; panel < L::kPanels; ++panel)
            sm90::tma_load(to + panel * L::kPanelBytes, &work.map, full, 0,
                           row + part * heads * block_size, panel, policy);
        }
        if (++place == kPlaces) {
          place = 0;
          phase ^= 1;
        }
      }
    }
    item = next;
    block = next_block;
  }
}

template <typename T, int kHeadDim, int kPlaces>
__device__ __forceinline__ void compute_items(const DecodeWork& w, const int* counts,
                                              const Share& share, DecodeItem item, int end,
                                              uint32_t ring, uint32_t barriers,
                                              const SplitExchange& x) {
  using L = DecodeSm90Layout<kHeadDim, kPlaces>;
  const AttentionParams& p = w.p;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const bool both = w.rows > 8;

  uint32_t q[kHeadDim / kMmaDepth][4];
  auto load_q = [&](const DecodeItem& at) {
    const QueryHeads heads(w, at.head_tile);
    const T* base = static_cast<const T*>(p.q) + (at.seq * p.num_q_heads + heads.first) * kHeadDim;
    const int r = lane / 4;
    load_queries<T, kHeadDim>(q, r < heads.count ? base + r * kHeadDim : nullptr,
                              r + 8 < heads.count ? base + (r + 8) * kHeadDim : nullptr);
  };
  load_q(item);
  int length = p.seq_lens[item.seq];
  RowSoFar<T, kHeadDim> row(item);
  unsigned before = 0;  // tiles of keys and values consumed by the block's earlier items

  while (item.first < end) {
    const int tiles = item.tiles_here();
    const int length_now = length;
    DecodeItem next = item;
    advance(next, counts, share.num_seqs, w.head_tiles);
    const bool more = next.first < end;
    const int own_last =
        length_now - 1 - item.split * kSplitTokens - warp * kTileTokens;  // in this warp's tile

    float s[kScores];
    if (warp < tiles) {
      const unsigned place = (before + warp) % kPlaces, turn = (before + warp) / kPlaces;
      sm90::mbarrier_wait(barriers + place * 16, turn & 1);
      score_tile<T, kHeadDim>(s, q, ring + place * L::kTileBytes);
      __syncwarp();
      if (lane == 0) mbarrier_arrive_many(barriers + place * 16 + 8, kDecodeWarps);
      publish_maxima(s, own_last, both, x);
    }
    if (more) {  // read while the rest of this split is worked on
      if (!next.same_row(item)) load_q(next);
      if (next.seq != item.seq) length = p.seq_lens[next.seq];
    }
    compute_barrier();

    RowState<kHeadDim> state;
    float factor[kTilesPerSplit][2];
    publish_probabilities<T, kHeadDim>(s, tiles, both, w.c, x, factor, state);
    const unsigned values = before + tiles;
    if (warp < tiles && own_last < kTileTokens - 1) {
      // Values past the sequence's end may be anything: 0 * NaN is NaN.
      const unsigned place = (values + warp) % kPlaces, turn = (values + warp) / kPlaces;
      sm90::mbarrier_wait(barriers + place * 16, turn & 1);
      const uint32_t at = ring + place * L::kTileBytes;
      for (int i = (own_last + 1) * 8 + lane; i < kTileTokens * 8; i += kWarpSize)
#pragma unroll
        for (int panel = 0; panel < L::kPanels; ++panel)
          asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at + i * 16 +
                                                                        panel * L::kPanelBytes),
                       "r"(0)
                       : "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // before the next copy here
    }
    compute_barrier();

#pragma unroll
    for (int t = 0; t < kTilesPerSplit; ++t) {
      if (t >= tiles) break;
      const unsigned place = (values + t) % kPlaces, turn = (values + t) / kPlaces;
      sm90::mbarrier_wait(barriers + place * 16, turn & 1);
      add_values<T, kHeadDim>(state, t, factor[t], x, ring + place * L::kTileBytes);
      __syncwarp();
      if (lane == 0) sm90::mbarrier_arrive(barriers + place * 16 + 8);
    }
    end_split(state);
    before = values + tiles;
    row.add(w, counts, item, more, state);
    item = next;
  }
}

#endif  // MINIVLLM_SM90A

template <typename T, int kHeadDim, int kPlaces, int kBlocksPerSm>
static __global__ void __launch_bounds__(kDecodeSm90Threads, kBlocksPerSm)
    decode_sm90_kernel(const __grid_constant__ DecodeSm90Work work) {
#ifdef MINIVLLM_SM90A
  using L = DecodeSm90Layout<kHeadDim, kPlaces>;
  const DecodeWork& w = work.w;
  extern __shared__ uint8_t smem[];
  constexpr uint32_t kAlign = sm90::kSwizzleAtom - 1;
  const uint32_t unaligned = sm90::shared_address(smem);
  const uint32_t ring = (unaligned + kAlign) & ~kAlign;
  uint8_t* base = smem + (ring - unaligned);
  const uint32_t barriers = ring + L::kBarriers;
  int* counts = reinterpret_cast<int*>(base + L::kCounts);
  pdl_launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < kPlaces; ++i) {
      sm90::mbarrier_init(barriers + i * 16, 1);
      sm90::mbarrier_init(barriers + i * 16 + 8, kDecodeWarps);
    }
    sm90::mbarrier_init_fence();
    sm90::prefetch_tensor_map(&work.map);
  }
  pdl_wait();
  const int most_tiles =
      count_tiles<kDecodeSm90Threads>(w.p, counts, reinterpret_cast<int*>(base + L::kScratch));

  const Share share(w, counts, most_tiles);
  if (share.total == 0) return;
  const int end = share.border(counts, blockIdx.x + 1);
  const DecodeItem item =
      find_item(share.border(counts, blockIdx.x), counts, share.num_seqs, share.head_tiles);
  if (item.first >= end) return;
  if (threadIdx.x >= kDecodeComputeThreads + kWarpSize) {
    finish_rows<T, kHeadDim>(w, counts, share, item, end);
  } else if (threadIdx.x >= kDecodeComputeThreads) {
    fetch_items<kHeadDim, kPlaces>(work, counts, item, end, ring, barriers);
  } else {
    compute_items<T, kHeadDim, kPlaces>(w, counts, share, item, end, ring, barriers,
                                        SplitExchange(base + L::kExchange));
  }
#endif
}

template <typename T, int kHeadDim, int kPlaces, int kBlocksPerSm>
static void launch_decode_sm90(const DecodeWork& w, int64_t max_blocks, Stream stream) {
  const KvCache& kv = w.p.kv;
  DecodeSm90Work work = {};
  work.w = w;
  work.map = sm90::k_block_map(
      kv.cache, w.p.dtype, kv.num_blocks * 2 * kv.num_kv_heads * kv.block_size, kHeadDim, kHeadDim,
      static_cast<int>(std::min<int64_t>(kv.block_size, kTileTokens)), 1);
  const int64_t grid = std::min<int64_t>(max_blocks, int64_t{num_sms()} * kBlocksPerSm);
  prefer_shared_memory(decode_sm90_kernel<T, kHeadDim, kPlaces, kBlocksPerSm>);
  MINIVLLM_LAUNCH(decode_sm90_kernel<T, kHeadDim, kPlaces, kBlocksPerSm>,
                  dim3(static_cast<unsigned>(grid)), dim3(kDecodeSm90Threads),
                  DecodeSm90Layout<kHeadDim, kPlaces>::bytes(w.p.num_seqs), stream, work);
}

}  // namespace minivllm::cuda::attention
