// The ring of decode_sm90.cuh: where it and what belongs to it lie in shared memory, and the warp
// that fills it with tiles of keys and values by TMA.
#pragma once

#include "attention_host.cuh"
#include "decode_parts.cuh"
#include "sm90.cuh"

namespace minivllm::cuda::attention {

// Shared memory, in order: ring, barriers (of each place: keys are there, values are there, both
// have been read; of the block's first two parts: the workspace has them; of what each warp is
// handed: it is there, it has been read), the count of tiles asked for, scratch, the block's parts,
// rows that warps are handed, what is known of the sequences, counts.
template <int kDim, int kRing, bool kHands = false>
struct DecodeSm90Layout {
  static constexpr int kHeadDim = kDim, kPlaces = kRing;
  static constexpr bool kHandsOver = kHands;
  static constexpr int kPanelBytes = kTileTokens * sm90::kSwizzleRow;
  static constexpr int kPanels = kHeadDim * 2 / sm90::kSwizzleRow;
  static constexpr int kTileBytes = kPanels * kPanelBytes;
  static constexpr int kPlaceBytes = 2 * kTileBytes;
  // What a row is handed from warp to warp as: o in pieces of 16 bytes a lane, then m and l.
  static constexpr int kHandedPiece = kWarpSize * 16;
  static constexpr int kHandedSums = kHeadDim / kMmaDepth * kHandedPiece;  // behind o's start
  static constexpr int kHandedBytes = kHandedSums + kWarpSize * 8;

  static constexpr int kBarriers = kPlaces * kPlaceBytes;
  static constexpr int kBarrierBytes = 24;
  static constexpr int kStored = kPlaces * kBarrierBytes;  // behind the barriers' start
  static constexpr int kHandedBarriers = kStored + 16;
  static constexpr int kAsked = kHandedBarriers + (kHandsOver ? kDecodeWarps * 16 : 0);
  static constexpr int kScratch = kBarriers + kAsked + 8;
  static constexpr int kParts = kScratch + 64;
  static constexpr int kHanded = (kParts + 64 + 15) / 16 * 16;
  static constexpr int kKnown = kHanded + (kHandsOver ? kDecodeWarps * kHandedBytes : 0);
  static_assert(kScratch % 8 == 0 && sizeof(RowParts) <= 64);

  static constexpr int bytes(int64_t num_seqs) {
    constexpr int kSeqBytes = sizeof(DecodeSequence) + sizeof(int);
    return kKnown + static_cast<int>(num_seqs) * kSeqBytes + static_cast<int>(sizeof(int)) +
           static_cast<int>(sm90::kSwizzleAtom);
  }
};

struct DecodeSm90Work {
  DecodeWork w;
  CUtensorMap map;  // the cache as [head_dim / 64][rows][64]
};

#ifdef MINIVLLM_SM90A

// By one thread. Then a barrier for the others.
template <typename L>
__device__ __forceinline__ void make_barriers(const DecodeSm90Work& work, uint32_t ring) {
  for (int i = 0; i < L::kAsked; i += 8)
    sm90::mbarrier_init(ring + L::kBarriers + i, i < L::kHandedBarriers ? 1 : kWarpSize);
  asm volatile("st.shared::cta.b32 [%0], 0;" ::"r"(ring + L::kBarriers + L::kAsked) : "memory");
  sm90::mbarrier_init_fence();
  sm90::prefetch_tensor_map(&work.map);
}

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

// Copies the tiles of the block's parts, keys and values of each. Lane i looks up piece i of a
// split in the block table, a split ahead.
template <typename L>
__device__ __forceinline__ void fetch_parts(const DecodeSm90Work& work, const RowParts& parts,
                                            const DecodeSequence* known, uint32_t ring,
                                            uint32_t barriers) {
  constexpr int kPlaces = L::kPlaces;
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

#endif  // MINIVLLM_SM90A

}  // namespace minivllm::cuda::attention
