// Decode attention for Hopper where rows are so few that the length of the chain from the first
// load to the last store counts, and how evenly they lie over the SMs. A cluster of four blocks
// takes a row of up to four splits, a block a split: its warps fetch a tile each, and work together
// as in decode_split.cuh. The blocks of the later splits put their results into the shared memory
// of the first, which merges them in order: no trip through the device's memory, no atomics.
//
// Longer rows are shared out as in decode_sm90.cuh. Which it is depends on the longest row of the
// batch, so all blocks agree; the bits are the same.
#pragma once

#include "decode_sm90.cuh"
#include "decode_split.cuh"

namespace minivllm::cuda::attention {

constexpr int kQuickBlocks = 4;  // of a cluster: the splits of a row, at most
constexpr int kQuickMaxSeqs = 80;

// Shared memory: that of decode_sm90.cuh with a place for each tile of a split, and behind it the
// partials of the other blocks, the sums and maxima of the split, the barrier of the partials.
template <int kHeadDim>
struct QuickLayout {
  using L = DecodeSm90Layout<kHeadDim, kTilesPerSplit>;
  static constexpr int kPartialBytes = kWarpHeads * (kHeadDim + 2) * 4;
  static constexpr int kExchangeBytes = SplitExchange::kSumBytes + SplitExchange::kMaximaBytes;
  static constexpr int kBarrier = (kQuickBlocks - 1) * kPartialBytes + kExchangeBytes;
  // Where they start, behind the ring's start.
  static constexpr int kStart = (L::bytes(kQuickMaxSeqs) - sm90::kSwizzleAtom + 15) / 16 * 16;
  static constexpr int kBytes = kStart + kBarrier + 8 + sm90::kSwizzleAtom;
};

#ifdef MINIVLLM_SM90A

// Of the first block of the cluster, the shared address that is `address` here.
__device__ __forceinline__ uint32_t first_block_address(uint32_t address) {
  return sm90::map_to_rank(address, 0);
}

// Values past the sequence's end may be anything, and 0 * NaN is NaN: rows `from` .. of a tile. No
// fence: a place is filled once here.
template <int kPanels, int kPanelBytes>
__device__ __forceinline__ void clear_rows(uint32_t values, int from) {
  for (int i = from * 8 + threadIdx.x % kWarpSize; i < kTileTokens * 8; i += kWarpSize)
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel)
      asm volatile(
          "st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(values + i * 16 + panel * kPanelBytes),
          "r"(0)
          : "memory");
}

// The four computing warps: one split of a row, whose slot and length are given; the first block
// writes the row.
template <typename T, int kHeadDim>
__device__ __forceinline__ void quick_split(const DecodeSm90Work& work, int seq, int head_tile,
                                            int slot, int length, int split, uint8_t* base,
                                            uint32_t ring) {
  using L = DecodeSm90Layout<kHeadDim, kTilesPerSplit>;
  using Q = QuickLayout<kHeadDim>;
  using State = RowState<kHeadDim>;
  const DecodeWork& w = work.w;
  const KvCache& kv = w.p.kv;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_tiles = (length + kTileTokens - 1) / kTileTokens;
  const int num_splits = (num_tiles + kTilesPerSplit - 1) / kTilesPerSplit;
  const int tiles = min(kTilesPerSplit, num_tiles - split * kTilesPerSplit);
  const int start = split * kSplitTokens + warp * kTileTokens;
  const uint32_t barriers = ring + L::kBarriers;
  if (warp < tiles) {
    const int heads = static_cast<int>(kv.num_kv_heads);
    const int block_size = static_cast<int>(kv.block_size);
    const int box = min(block_size, kTileTokens);
    const int position = start + lane * box;
    const bool inside = lane * box < kTileTokens && position < length;
    const int boxes = __popc(__ballot_sync(kFullMask, inside));
    if (start + kTileTokens >= length) pdl_wait();  // for the last token's key and value
    const uint32_t full = barriers + warp * L::kBarrierBytes;
    if (lane == 0) {
      const int bytes = boxes * box * sm90::kSwizzleRow * L::kPanels;
      sm90::mbarrier_expect(full, bytes);
      sm90::mbarrier_expect(full + 8, bytes);
    }
    __syncwarp();
    if (inside) {
      const int index = position / block_size;
      const int block = load_settled(kv.block_table + slot * kv.block_table_stride + index);
      const int row = (block * 2 * heads + head_tile / w.tiles_a_head) * block_size + position -
                      index * block_size;
      const uint32_t to = ring + warp * L::kPlaceBytes + lane * box * sm90::kSwizzleRow;
      const uint64_t policy = sm90::evict_first_policy();
#pragma unroll
      for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int panel = 0; panel < L::kPanels; ++panel)
          sm90::tma_load(to + part * L::kTileBytes + panel * L::kPanelBytes, &work.map,
                         full + part * 8, 0, row + part * heads * block_size, panel, policy);
    }
    __syncwarp();
  }

  pdl_wait();
  const QueryHeads heads(w, head_tile);
  const int64_t offset = (seq * w.p.num_q_heads + heads.first) * kHeadDim;
  uint32_t q[kHeadDim / kMmaDepth][4];
  load_queries<T, kHeadDim>(q,
                            lane / 4 < heads.count
                                ? static_cast<const T*>(w.p.q) + offset + lane / 4 * kHeadDim
                                : nullptr,
                            nullptr);
  uint8_t* own = base + Q::kStart;
  uint8_t* exchange = own + (kQuickBlocks - 1) * Q::kPartialBytes;
  // A warp's probabilities take the place of its keys, which nobody else reads.
  const SplitExchange x(base, L::kPlaceBytes / 16, exchange);
  float s[kScores];
  if (warp < tiles) {
    sm90::mbarrier_wait(barriers + warp * L::kBarrierBytes, 0);
    score_tile<T, kHeadDim>(s, q, ring + warp * L::kPlaceBytes);
    __syncwarp();
    publish_maxima(s, length - 1 - start, false, x);
  }
  compute_barrier();
  State state;
  float factor[kTilesPerSplit][2];
  publish_probabilities<T, kHeadDim>(s, tiles, false, w.c, x, factor, state);
  if (warp < tiles && length - start < kTileTokens) {
    sm90::mbarrier_wait(barriers + warp * L::kBarrierBytes + 8, 0);
    clear_rows<L::kPanels, L::kPanelBytes>(ring + warp * L::kPlaceBytes + L::kTileBytes,
                                           length - start);
  }
  compute_barrier();
#pragma unroll
  for (int t = 0; t < kTilesPerSplit; ++t) {
    if (t >= tiles) break;
    sm90::mbarrier_wait(barriers + t * L::kBarrierBytes + 8, 0);
    add_values<T, kHeadDim>(state, t, factor[t], x, ring + t * L::kPlaceBytes + L::kTileBytes);
  }
  end_split(state);

  const int r = State::row(0);
  const uint32_t partials = sm90::shared_address(own);
  const uint32_t barrier = partials + Q::kBarrier;
  if (split > 0) {
    if (r >= heads.count) return;
    const uint32_t to = first_block_address(partials + (split - 1) * Q::kPartialBytes);
    const uint32_t there = first_block_address(barrier);
    if (warp == 0 && lane % 4 == 0) {
      sm90::store_remote(to + r * 8, make_float2(state.m[0], state.l[0]), there);
    }
#pragma unroll
    for (int b = 0; b < State::kBlocks; ++b)
      sm90::store_remote(to + 8 * kWarpHeads + (r * kHeadDim + State::column(b)) * 4,
                         make_float2(state.o[b][0], state.o[b][1]), there);
    return;
  }
  if (num_splits > 1) {
    if (threadIdx.x == 0)
      sm90::mbarrier_expect(barrier, (num_splits - 1) * heads.count * (kHeadDim + 2) * 4);
    sm90::mbarrier_wait(barrier, 0);
    for (int i = 0; i < num_splits - 1; ++i) {
      const uint8_t* from = own + i * Q::kPartialBytes;
      State next = {};
      next.m[0] = next.m[1] = -INFINITY;
      if (r < heads.count) {
        const float2 sums = reinterpret_cast<const float2*>(from)[r];
        next.m[0] = sums.x;
        next.l[0] = sums.y;
#pragma unroll
        for (int b = 0; b < State::kBlocks; ++b) {
          const float2 o = *reinterpret_cast<const float2*>(from + 8 * kWarpHeads +
                                                            (r * kHeadDim + State::column(b)) * 4);
          next.o[b][0] = o.x;
          next.o[b][1] = o.y;
        }
      }
      state.merge(next, w.c);
    }
  }
  state.write(static_cast<T*>(w.p.out) + offset, heads.count);
}

#endif  // MINIVLLM_SM90A

#ifdef MINIVLLM_SM90A
#define MINIVLLM_QUICK_CLUSTER __cluster_dims__(kQuickBlocks, 1, 1)
#else  // other targets know no clusters, and run no body
#define MINIVLLM_QUICK_CLUSTER
#endif
template <typename T, int kHeadDim, int kBlocksPerSm>
static __global__ void MINIVLLM_QUICK_CLUSTER __launch_bounds__(kDecodeSm90Threads, kBlocksPerSm)
    decode_quick_kernel(const __grid_constant__ DecodeSm90Work work) {
#ifdef MINIVLLM_SM90A
  const DecodeWork& w = work.w;
  const AttentionParams& p = w.p;
  extern __shared__ uint8_t smem[];
  constexpr uint32_t kAlign = sm90::kSwizzleAtom - 1;
  const uint32_t unaligned = sm90::shared_address(smem);
  const uint32_t ring = (unaligned + kAlign) & ~kAlign;
  uint8_t* base = smem + (ring - unaligned);
  pdl_launch_dependents();
  if (threadIdx.x == 0) {
    using Q = QuickLayout<kHeadDim>;
    sm90::mbarrier_init(ring + Q::kStart + Q::kBarrier, 1);
    make_barriers<DecodeSm90Layout<kHeadDim, kTilesPerSplit>>(work, ring);
  }
  sm90::cluster_barrier();  // the first block's barrier stands before another block counts on it
  if (!p.settled) pdl_wait();

  const int row = static_cast<int>(blockIdx.x) / kQuickBlocks;
  const int seq = row / w.head_tiles;
  const bool exists = seq < p.num_seqs;
  const int slot = exists ? load_settled(p.slots + seq) : -1;
  const int length = exists ? load_settled(p.seq_lens + seq) : 0;
  int most = 0;
  for (int s = threadIdx.x % kWarpSize; s < p.num_seqs; s += kWarpSize) {
    const int other = load_settled(p.seq_lens + s);
    most = max(most, load_settled(p.slots + s) < 0 ? 0 : other);
  }
  if (__reduce_max_sync(kFullMask, most) > kQuickBlocks * kSplitTokens) {
    if (static_cast<int>(blockIdx.x) >= w.num_ctas) return pdl_wait();
    return decode_share<T, DecodeSm90Layout<kHeadDim, kTilesPerSplit>>(work, base, ring);
  }
  const int split = static_cast<int>(blockIdx.x) % kQuickBlocks;
  if (slot < 0 || split * kSplitTokens >= length || threadIdx.x >= kDecodeComputeThreads)
    return pdl_wait();
  quick_split<T, kHeadDim>(work, seq, row - seq * w.head_tiles, slot, length, split, base, ring);
#endif
}

#undef MINIVLLM_QUICK_CLUSTER

// Whether the rows are few enough; if so, launches.
template <typename T, int kHeadDim>
static bool launch_decode_quick(DecodeWork w, Stream stream) {
  constexpr int kBlocksPerSm = kHeadDim == 64 ? 3 : 1;
  // The blocks of a cluster need places in one part of the card, so not every place can be filled.
  const int64_t room = int64_t{num_sms()} * kBlocksPerSm * 5 / 6 / kQuickBlocks * kQuickBlocks;
  const int64_t blocks = w.p.num_seqs * w.head_tiles * kQuickBlocks;
  // Twice the places: many of the blocks lie beyond a row's end and have nothing to do.
  const int64_t most = kHeadDim == 64 ? int64_t{num_sms()} * 2 * kBlocksPerSm : room;
  if (blocks > most || w.p.num_seqs > kQuickMaxSeqs) return false;
  const bool long_rows = w.p.max_seq_len > kQuickBlocks * kSplitTokens;
  const int64_t grid = long_rows ? std::max(room, blocks) : blocks;
  w.num_ctas = static_cast<int>(room);
  const auto kernel = decode_quick_kernel<T, kHeadDim, kBlocksPerSm>;
  MINIVLLM_LAUNCH(kernel, dim3(static_cast<unsigned>(grid)), dim3(kDecodeSm90Threads),
                  QuickLayout<kHeadDim>::kBytes, stream, decode_sm90_work(w));
  return true;
}

}  // namespace minivllm::cuda::attention
