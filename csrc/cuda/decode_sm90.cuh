// Decode attention for Hopper. Block = four warps that compute and one that copies tiles of 64 keys
// and their values by TMA into a ring, in the order of the block's rows. A row, or the block's part
// of one, is one warp's alone (decode_warp.cuh): warps take rows in turn, wait for nobody but the
// copies, and hand each place of the ring back as they leave it. A block has most of its ring on
// the way whatever its warps do. Where blocks have no more rows than warps, heads of 64 have an
// instance in which the warps take splits in turn and hand on the row so far; splits merge in order
// all the same.
//
// A row that goes on in the next run's block is the block's first, so that by the time the block
// ends, all parts of cut rows have been merged. Few rows take decode_quick.cuh where they are
// short.
#pragma once

#include <algorithm>

#include "attention_host.cuh"
#include "decode_finish.cuh"
#include "decode_parts.cuh"
#include "decode_ring.cuh"
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

#ifdef MINIVLLM_SM90A

// How a row goes from one warp to the next, split by split: each warp has a place that the one
// before it fills. Each lane speaks for itself, so that compute-sanitizer can follow.
template <typename T, typename L>
struct HandOver {
  using Row = WarpRow<T, L::kHeadDim>;
  uint32_t ring;
  int warp, lane;
  uint32_t sent = 0, received = 0;

  __device__ uint32_t place(int of) const { return ring + L::kHanded + of * L::kHandedBytes; }
  // It is there; 8 bytes further: it has been read.
  __device__ uint32_t barrier(int of) const {
    return ring + L::kBarriers + L::kHandedBarriers + of * 16;
  }
  __device__ void send(const Row& row) {
    const int to = (warp + 1) % kDecodeWarps;
    sm90::mbarrier_wait(barrier(to) + 8, (sent++ & 1) ^ 1);  // places start empty
#pragma unroll
    for (int d = 0; d < Row::kDepth; ++d)
      sm90::store_shared(place(to) + d * L::kHandedPiece + lane * 16, row.row_o[d]);
    sm90::store_shared(place(to) + L::kHandedSums + lane * 8, make_float2(row.row_m, row.row_l));
    sm90::mbarrier_arrive(barrier(to));
  }
  __device__ void receive(Row& row) {
    sm90::mbarrier_wait(barrier(warp), received++ & 1);
#pragma unroll
    for (int d = 0; d < Row::kDepth; ++d)
      sm90::load_shared(row.row_o[d], place(warp) + d * L::kHandedPiece + lane * 16);
    float2 sums;
    sm90::load_shared(sums, place(warp) + L::kHandedSums + lane * 8);
    row.row_m = sums.x;
    row.row_l = sums.y;
    sm90::mbarrier_arrive(barrier(warp) + 8);
  }
};

// The parts that are this warp's: every fourth; or, with hand-overs, every fourth of their splits.
template <typename T, typename L>
__device__ __forceinline__ void compute_parts(const DecodeWork& w, const RowParts& parts,
                                              const DecodeSequence* known, uint32_t ring,
                                              uint32_t barriers) {
  constexpr int kHeadDim = L::kHeadDim, kPlaces = L::kPlaces;
  constexpr bool kApart = L::kHandsOver;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  WarpRow<T, kHeadDim> row;
  [[maybe_unused]] HandOver<T, L> hand = {ring, warp, lane};
  [[maybe_unused]] int unit = 0;  // splits so far
  int asked = 0;                  // as last seen
  pdl_wait();
  for (int index = kApart ? 0 : warp; index < parts.count; index += kApart ? 1 : kDecodeWarps) {
    const RowPart part = parts[index];
    if (part.empty()) continue;
    const QueryHeads heads(w, parts.head_tile);
    const int64_t offset = (part.seq * w.p.num_q_heads + heads.first) * kHeadDim;
    row.load_queries(static_cast<const T*>(w.p.q) + offset, heads.count);
    // The last visible key, counted from the start of the tile at hand.
    int last = known[part.seq].length - 1 - part.first_split * kSplitTokens;
    const bool from_start = part.first_split == 0;
    int tile = part.before;
#pragma unroll 1
    for (int split = part.first_split; split < part.end_split; ++split) {
      const int tiles = part.tiles(split);
      if (kApart && unit++ % kDecodeWarps != warp) {
        tile += tiles;
        last -= tiles * kTileTokens;
        continue;
      }
      int place = tile % kPlaces;
      uint32_t phase = tile / kPlaces & 1;
      row.begin_split();
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
      const bool is_first = split == part.first_split, is_last = split + 1 == part.end_split;
      if (!from_start) {  // each split of its own; what is handed on says that it is stored
        row.begin_row();
        row.store(partial<kHeadDim>(w, parts.counts, parts.item(part), split), heads.count);
      }
      if constexpr (kApart) {
        if (!is_first) hand.receive(row);
      }
      if (from_start) {
        if (is_first) {
          row.begin_row();
        } else {
          row.merge(w.c);
        }
      }
      if constexpr (kApart) {
        if (!is_last) hand.send(row);
      }
      if (!is_last) continue;
      if (part.whole()) {
        row.write(static_cast<T*>(w.p.out) + offset, heads.count);
      } else {
        if (from_start)
          row.store(partial<kHeadDim>(w, parts.counts, parts.item(part), 0), heads.count);
        __syncwarp();
        if (lane == 0) sm90::mbarrier_arrive(barriers + L::kStored + index * 8);
      }
    }
  }
}

// What a block does once its barriers stand. Wherever it ends, it has waited for the kernels
// before.
template <typename T, typename L>
__device__ __forceinline__ void decode_share(const DecodeSm90Work& work, uint8_t* base,
                                             uint32_t ring) {
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
    fetch_parts<L>(work, parts, known, ring, ring + L::kBarriers);
    pdl_wait();
    // Only the first two of the block's parts can be cut.
    for (int index = 0; index < min(parts.count, 2); ++index) {
      const RowPart part = parts[index];
      if (part.empty() || part.whole()) continue;
      sm90::mbarrier_wait(ring + L::kBarriers + L::kStored + index * 8, 0);
      finish_cut_row<T, L::kHeadDim, 4>(w, counts, share, parts.item(part),
                                        part.end_split - part.first_split);
    }
  } else {
    compute_parts<T, L>(w, parts, known, ring, ring + L::kBarriers);
  }
}

#endif  // MINIVLLM_SM90A

template <typename T, typename L, int kBlocksPerSm>
static __global__ void __launch_bounds__(kDecodeSm90Threads, kBlocksPerSm)
    decode_sm90_kernel(const __grid_constant__ DecodeSm90Work work) {
#ifdef MINIVLLM_SM90A
  extern __shared__ uint8_t smem[];
  constexpr uint32_t kAlign = sm90::kSwizzleAtom - 1;
  const uint32_t unaligned = sm90::shared_address(smem);
  const uint32_t ring = (unaligned + kAlign) & ~kAlign;
  pdl_launch_dependents();
  if (threadIdx.x == 0) make_barriers<L>(work, ring);
  if (!work.w.p.settled) pdl_wait();
  decode_share<T, L>(work, smem + (ring - unaligned), ring);
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

template <typename T, typename L, int kBlocksPerSm>
static void launch_decode_sm90(const DecodeWork& w, Stream stream) {
  const auto kernel = decode_sm90_kernel<T, L, kBlocksPerSm>;
  MINIVLLM_LAUNCH(kernel, dim3(static_cast<unsigned>(w.num_ctas)), dim3(kDecodeSm90Threads),
                  L::bytes(w.p.num_seqs), stream, decode_sm90_work(w));
}

template <typename T, int kHeadDim>
static void launch_decode_sm90(DecodeWork w, int64_t max_blocks, Stream stream) {
  constexpr int kBlocksPerSm = 2, kPlaces = kHeadDim == 64 ? 6 : 3;
  const int64_t grid =
      decode_grid(std::min<int64_t>(max_blocks, int64_t{num_sms()} * kBlocksPerSm), w.head_tiles);
  w.num_ctas = static_cast<int>(grid);
  if constexpr (kHeadDim == 64) {
    using HandsOver = DecodeSm90Layout<kHeadDim, kPlaces, true>;
    const bool fits = kBlocksPerSm * (HandsOver::bytes(w.p.num_seqs) + kSmemReserved) <= kSmemPerSm;
    if (fits && w.p.num_seqs * w.head_tiles <= kDecodeWarps * grid)
      return launch_decode_sm90<T, HandsOver, kBlocksPerSm>(w, stream);
  }
  launch_decode_sm90<T, DecodeSm90Layout<kHeadDim, kPlaces>, kBlocksPerSm>(w, stream);
}

}  // namespace minivllm::cuda::attention
