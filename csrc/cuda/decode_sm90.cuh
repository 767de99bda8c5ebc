// Decode attention for Hopper. Block = four warps that compute and one that copies tiles of 64 keys
// and their values by TMA into a ring, in the order of the block's rows. A row, or the block's part
// of one, is one warp's alone (decode_warp.cuh): warps take rows in turn, wait for nobody but the
// copies, and hand each place of the ring back as they leave it. A block has most of its ring on
// the way whatever its warps do.
//
// A row that goes on in the next run's block is the block's first, so that by the time the block
// ends, all parts of cut rows have been merged. Few rows take decode_quick.cuh where they are
// short.
#pragma once

#include <algorithm>

#include "attention_host.cuh"
#include "decode_finish.cuh"
#include "decode_parts.cuh"
#include "decode_warp.cuh"
#include "sm90.cuh"

namespace minivllm::cuda::attention {

constexpr int kDecodeSm90Threads = kDecodeComputeThreads + kWarpSize;

constexpr bool has_decode_sm90(int head_dim) { return head_dim == 64 || head_dim == 128; }

inline bool decode_sm90_supported(const AttentionParams& p) {
  const int64_t size = p.kv.block_size;
  const bool boxes = size % kTileTokens == 0 || size == 8 || size == 16 || size == 32;
  constexpr int64_t kMaxCoordinate = int64_t{1} << 31;
  return compute_capability() == 90 && boxes &&
         p.kv.num_blocks * 2 * p.kv.num_kv_heads * size < kMaxCoordinate;
}

// Shared memory, in order: ring, barriers (of each place: keys are there, values are there, both
// have been read; of the block's first two parts: the workspace has them), scratch, counts, what is
// known of the sequences.
template <int kHeadDim, int kPlaces>
struct DecodeSm90Layout {
  static constexpr int kPanelBytes = kTileTokens * sm90::kSwizzleRow;
  static constexpr int kPanels = kHeadDim * 2 / sm90::kSwizzleRow;
  static constexpr int kTileBytes = kPanels * kPanelBytes;
  static constexpr int kPlaceBytes = 2 * kTileBytes;
  static constexpr int kBarriers = kPlaces * kPlaceBytes;
  static constexpr int kBarrierBytes = 24;
  static constexpr int kStored = kPlaces * kBarrierBytes;  // behind the barriers' start
  static constexpr int kAsked = kStored + 16;
  static constexpr int kScratch = kBarriers + kAsked + 8;
  static constexpr int kParts = kScratch + 64;
  static constexpr int kKnown = kParts + 64;
  static_assert(kScratch % 8 == 0);
  static constexpr int bytes(int64_t num_seqs) {
    return kKnown + static_cast<int>(num_seqs * 8 + (num_seqs + 1) * 4) + sm90::kSwizzleAtom;
  }
};

struct DecodeSm90Work {
  DecodeWork w;
  CUtensorMap map;  // the cache as [head_dim / 64][rows][64]
};

#ifdef MINIVLLM_SM90A

// The count of tiles whose copies have been asked for. Both sides are atomic: a releasing store and
// an acquiring load of shared memory are plain ones in machine code, which compute-sanitizer takes
// for a race.
__device__ __forceinline__ void count_asked(uint32_t counter) {
  asm volatile("red.release.cta.shared::cta.add.u32 [%0], 1;" ::"r"(counter) : "memory");
}
__device__ __forceinline__ int load_asked(uint32_t counter) {
  int value;
  asm volatile("atom.acquire.cta.shared::cta.or.b32 %0, [%1], 0;"
               : "=r"(value)
               : "r"(counter)
               : "memory");
  return value;
}

// Copies the tiles of the block's parts, keys and values of each. Lane i looks up piece i of a
// split in the block table, a split ahead.
template <int kHeadDim, int kPlaces>
__device__ __forceinline__ void fetch_parts(const DecodeSm90Work& work, const RowParts& parts,
                                            const DecodeSequence* known, uint32_t ring,
                                            uint32_t barriers) {
  using L = DecodeSm90Layout<kHeadDim, kPlaces>;
  const KvCache& kv = work.w.p.kv;
  const int lane = threadIdx.x % kWarpSize;
  const int heads = static_cast<int>(kv.num_kv_heads);
  const int block_size = static_cast<int>(kv.block_size);
  const int box = min(block_size, kTileTokens), boxes_a_tile = kTileTokens / box;
  const uint64_t policy = sm90::evict_first_policy();
  struct Cursor {
    RowPart part;
    int index, split;
  };
  auto settle = [&](Cursor& at) {
    while (at.index < parts.count && at.split >= at.part.end_split) {
      if (++at.index == parts.count) break;
      at.part = parts[at.index];
      at.split = at.part.first_split;
    }
  };
  // The row of the cache where this lane's piece of the split's keys starts, or -1.
  auto look_up = [&](const Cursor& at) {
    if (at.index >= parts.count) return -1;
    const DecodeSequence sequence = known[at.part.seq];
    const int position = at.split * kSplitTokens + lane * box;
    if (lane >= kTilesPerSplit * boxes_a_tile || position >= sequence.length) return -1;
    const int index = position / block_size;
    const int block = load_settled(kv.block_table + sequence.slot * kv.block_table_stride + index);
    return (block * 2 * heads + parts.head_tile / work.w.tiles_a_head) * block_size + position -
           index * block_size;
  };
  Cursor at = {parts[0], 0, 0};
  at.split = at.part.first_split;
  settle(at);
  int row = look_up(at);
  int place = 0;
  uint32_t phase = 1;  // places start empty
  bool has_waited = !work.w.p.settled;
  while (at.index < parts.count) {
    Cursor next = at;
    ++next.split;
    settle(next);
    const int next_row = look_up(next);
    const int tiles = at.part.tiles(at.split);
    const unsigned inside = __ballot_sync(kFullMask, row >= 0);
    for (int t = 0; t < tiles; ++t) {
      const uint32_t full = barriers + place * L::kBarrierBytes;
      sm90::mbarrier_wait(full + 16, phase);
      if (!has_waited && at.split * kTilesPerSplit + t == at.part.num_tiles - 1) {
        pdl_wait();  // for the last token's key and value
        has_waited = true;
      }
      const int first = t * boxes_a_tile;
      const unsigned mine =
          inside & ((boxes_a_tile == kWarpSize ? kFullMask : (1u << boxes_a_tile) - 1) << first);
      if (lane == 0) {
        const int bytes = __popc(mine) * box * sm90::kSwizzleRow * L::kPanels;
        sm90::mbarrier_expect(full, bytes);
        sm90::mbarrier_expect(full + 8, bytes);
        count_asked(barriers + L::kAsked);
      }
      __syncwarp();
      if (mine >> lane & 1) {
        const uint32_t to =
            ring + place * L::kPlaceBytes + (lane - first) * box * sm90::kSwizzleRow;
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
          for (int panel = 0; panel < L::kPanels; ++panel)
            sm90::tma_load(to + part * L::kTileBytes + panel * L::kPanelBytes, &work.map,
                           full + part * 8, 0, row + part * heads * block_size, panel, policy);
      }
      if (++place == kPlaces) {
        place = 0;
        phase ^= 1;
      }
    }
    at = next;
    row = next_row;
  }
}

// Waits until the block's copies number `tile` (before + t) have been asked for. A barrier's parity
// tells one phase from the next and no more; a warp that runs ahead of the copies by a whole ring
// would take the phase before its own for its own.
__device__ __forceinline__ void wait_asked(uint32_t counter, int tile, int& asked) {
  constexpr unsigned kNanoseconds = 50;  // the copies take longer
  const bool first_lane = threadIdx.x % kWarpSize == 0;
  while (asked <= tile) {
    if (first_lane) asked = load_asked(counter);
    asked = __shfl_sync(kFullMask, asked, 0);
    if (asked <= tile) __nanosleep(kNanoseconds);
  }
  __syncwarp();
}

// The parts that are this warp's: every fourth.
template <typename T, int kHeadDim, int kPlaces>
__device__ __forceinline__ void compute_parts(const DecodeWork& w, const RowParts& parts,
                                              const DecodeSequence* known, uint32_t ring,
                                              uint32_t barriers) {
  using L = DecodeSm90Layout<kHeadDim, kPlaces>;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  WarpRow<T, kHeadDim> row;
  int asked = 0;  // as last seen
  pdl_wait();
  for (int index = warp; index < parts.count; index += kDecodeWarps) {
    const RowPart part = parts[index];
    if (part.empty()) continue;
    const QueryHeads heads(w, parts.head_tile);
    const int64_t offset = (part.seq * w.p.num_q_heads + heads.first) * kHeadDim;
    row.load_queries(static_cast<const T*>(w.p.q) + offset, heads.count);
    // The last visible key, counted from the start of the tile at hand.
    int last = known[part.seq].length - 1 - part.first_split * kSplitTokens;
    const bool from_start = part.first_split == 0;
    int tile = part.before;
    int place = tile % kPlaces;
    uint32_t phase = tile / kPlaces & 1;
#pragma unroll 1
    for (int split = part.first_split; split < part.end_split; ++split) {
      row.begin_split();
      const int tiles = part.tiles(split);
#pragma unroll 1
      for (int t = 0; t < tiles; ++t, last -= kTileTokens) {
        const uint32_t full = barriers + place * L::kBarrierBytes;
        const uint32_t keys = ring + place * L::kPlaceBytes, values = keys + L::kTileBytes;
        wait_asked(barriers + L::kAsked, tile++, asked);
        sm90::mbarrier_wait(full, phase);
        typename WarpRow<T, kHeadDim>::Scores s;
        row.score(s, keys);
        uint32_t p[kTileBlocks];
        row.soften(s, last, w.c, p);
        sm90::mbarrier_wait(full + 8, phase);
        row.add_values(p, values, last);
        __syncwarp();
        if (lane == 0) sm90::mbarrier_arrive(full + 16);
        if (++place == kPlaces) {
          place = 0;
          phase ^= 1;
        }
      }
      row.end_split();
      if (split == part.first_split || !from_start) {
        row.begin_row();
      } else {
        row.merge(w.c);
      }
      if (!from_start)
        row.store(partial<kHeadDim>(w, parts.counts, parts.item(part), split), heads.count);
    }
    if (part.whole()) {
      row.write(static_cast<T*>(w.p.out) + offset, heads.count);
      continue;
    }
    if (from_start) row.store(partial<kHeadDim>(w, parts.counts, parts.item(part), 0), heads.count);
    __syncwarp();
    if (lane == 0) sm90::mbarrier_arrive(barriers + L::kStored + index * 8);
  }
}

// What a block does once its barriers stand. Wherever it ends, it has waited for the kernels
// before.
template <typename T, int kHeadDim, int kPlaces>
__device__ __forceinline__ void decode_share(const DecodeSm90Work& work, uint8_t* base,
                                             uint32_t ring) {
  using L = DecodeSm90Layout<kHeadDim, kPlaces>;
  const DecodeWork& w = work.w;
  auto* known = reinterpret_cast<DecodeSequence*>(base + L::kKnown);
  int* counts = reinterpret_cast<int*>(known + w.p.num_seqs);
  const int most_tiles = count_tiles<kDecodeSm90Threads>(
      w.p, counts, reinterpret_cast<int*>(base + L::kScratch), known);
  const Share share(w, counts, most_tiles);
  if (share.total == 0) return pdl_wait();
  // In shared memory, where it takes no registers of the loops.
  auto* shared_parts = reinterpret_cast<RowParts*>(base + L::kParts);
  if (threadIdx.x < kWarpSize) {
    const RowParts own(share, counts);
    if (threadIdx.x == 0) *shared_parts = own;
  }
  __syncthreads();
  const RowParts& parts = *shared_parts;
  if (parts.begin >= parts.end) return pdl_wait();
  if (threadIdx.x >= kDecodeComputeThreads) {
    fetch_parts<kHeadDim, kPlaces>(work, parts, known, ring, ring + L::kBarriers);
    pdl_wait();
    // Only the first two of the block's parts can be cut.
    for (int index = 0; index < min(parts.count, 2); ++index) {
      const RowPart part = parts[index];
      if (part.empty() || part.whole()) continue;
      sm90::mbarrier_wait(ring + L::kBarriers + L::kStored + index * 8, 0);
      finish_cut_row<T, kHeadDim, 4>(w, counts, share, parts.item(part),
                                     part.end_split - part.first_split);
    }
  } else {
    compute_parts<T, kHeadDim, kPlaces>(w, parts, known, ring, ring + L::kBarriers);
  }
}

// By one thread. Then a barrier for the others.
template <int kHeadDim, int kPlaces>
__device__ __forceinline__ void make_barriers(const DecodeSm90Work& work, uint32_t ring) {
  using L = DecodeSm90Layout<kHeadDim, kPlaces>;
  for (int i = 0; i < L::kAsked; i += 8) sm90::mbarrier_init(ring + L::kBarriers + i, 1);
  asm volatile("st.shared::cta.b32 [%0], 0;" ::"r"(ring + L::kBarriers + L::kAsked) : "memory");
  sm90::mbarrier_init_fence();
  sm90::prefetch_tensor_map(&work.map);
}

#endif  // MINIVLLM_SM90A

template <typename T, int kHeadDim, int kPlaces, int kBlocksPerSm>
static __global__ void __launch_bounds__(kDecodeSm90Threads, kBlocksPerSm)
    decode_sm90_kernel(const __grid_constant__ DecodeSm90Work work) {
#ifdef MINIVLLM_SM90A
  extern __shared__ uint8_t smem[];
  constexpr uint32_t kAlign = sm90::kSwizzleAtom - 1;
  const uint32_t unaligned = sm90::shared_address(smem);
  const uint32_t ring = (unaligned + kAlign) & ~kAlign;
  pdl_launch_dependents();
  if (threadIdx.x == 0) make_barriers<kHeadDim, kPlaces>(work, ring);
  if (!work.w.p.settled) pdl_wait();
  decode_share<T, kHeadDim, kPlaces>(work, smem + (ring - unaligned), ring);
#endif
}

inline DecodeSm90Work decode_sm90_work(const DecodeWork& w) {
  const KvCache& kv = w.p.kv;
  DecodeSm90Work work = {};
  work.w = w;
  work.map = sm90::k_block_map(
      kv.cache, w.p.dtype, kv.num_blocks * 2 * kv.num_kv_heads * kv.block_size, kv.head_dim,
      kv.head_dim, static_cast<int>(std::min<int64_t>(kv.block_size, kTileTokens)), 1);
  return work;
}

template <typename T, int kHeadDim, int kPlaces, int kBlocksPerSm>
static void launch_decode_sm90(DecodeWork w, int64_t max_blocks, Stream stream) {
  const auto kernel = decode_sm90_kernel<T, kHeadDim, kPlaces, kBlocksPerSm>;
  const int64_t grid =
      decode_grid(std::min<int64_t>(max_blocks, int64_t{num_sms()} * kBlocksPerSm), w.head_tiles);
  w.num_ctas = static_cast<int>(grid);
  MINIVLLM_LAUNCH(kernel, dim3(static_cast<unsigned>(grid)), dim3(kDecodeSm90Threads),
                  DecodeSm90Layout<kHeadDim, kPlaces>::bytes(w.p.num_seqs), stream,
                  decode_sm90_work(w));
}

}  // namespace minivllm::cuda::attention
