// Prefill attention for Hopper: wgmma fed by TMA, the arithmetic of attention_common.cuh.
//
// Block = two or three warpgroups of 64 query rows, which compute, and one that serves them: a warp
// finds the items (prefill_schedule.cuh) and copies their keys and values, 64 at a time, into a
// ring; three warps copy their queries. A computing warpgroup goes through the tiles of all items
// without a stop: it issues the scores of the next tile and P v of this one, and works on the next
// tile's softmax while the other warpgroups' products run. They take turns in issuing.
//
// TMA reads the cache as rows of head_dim: a tile of 64 keys is one block, part of one, or some.
// Rows past a sequence's end may hold anything: keys are masked, values are overwritten with zeros.
// https://arxiv.org/abs/2407.08608
#pragma once

#include <algorithm>

#include "prefill_compute.cuh"

namespace minivllm::cuda::attention {

constexpr bool has_prefill_sm90(int head_dim) { return head_dim == 64 || head_dim == 128; }

inline bool prefill_sm90_supported(const AttentionParams& p) {
  const int64_t size = p.kv.block_size;
  const bool boxes = size % kTileTokens == 0 || size == 8 || size == 16 || size == 32;
  constexpr int64_t kMaxCoordinate = int64_t{1} << 31;
  return compute_capability() == 90 && boxes &&
         p.kv.num_blocks * 2 * p.kv.num_kv_heads * size < kMaxCoordinate;
}

struct PrefillSm90Work {
  PrefillWork w;
  CUtensorMap map;  // the cache as [head_dim / 64][rows][64]
};

#ifdef MINIVLLM_SM90A

// One warp: finds the items, publishes them, copies their keys and values.
template <int kHeadDim>
__device__ __forceinline__ void serve_keys(const PrefillSm90Work& work, uint32_t base,
                                           PrefillItem* items) {
  using L = PrefillLayout<kHeadDim>;
  const PrefillWork& w = work.w;
  const KvCache& kv = w.p.kv;
  const int lane = threadIdx.x % kWarpSize;
  const int heads = static_cast<int>(kv.num_kv_heads);
  const int block_size = static_cast<int>(kv.block_size);
  const int box = min(block_size, kTileTokens), boxes_a_tile = kTileTokens / box;
  const int tiles_a_look = kWarpSize / boxes_a_tile;
  const uint64_t policy = sm90::evict_normal_policy();
  sm90::prefetch_tensor_map(&work.map);
  PrefillSchedule<L::kRows> schedule(w);
  RingPlace<L::kStages> stage;
  RingPlace<L::kEntries> entry;
  while (true) {
    const PrefillItem item = schedule.next();
    const uint32_t entry_barriers = base + L::kEntryBarriers + entry.at * 24;
    sm90::mbarrier_wait(entry_barriers + 16, entry.phase ^ 1);
    if (lane == 0) {
      items[entry.at] = item;
      sm90::mbarrier_arrive(entry_barriers);
    }
    entry.advance();
    if (item.num_tiles == 0) break;
    const int32_t* table = kv.block_table + item.slot * kv.block_table_stride;
    int row = 0;  // of this lane's piece of the keys
    for (int t = 0; t < item.num_tiles; ++t) {
      const int in_look = t % tiles_a_look;
      if (in_look == 0) {
        const int position = t * kTileTokens + lane * box;
        if (position < item.seq_len)
          row = (table[position / block_size] * 2 * heads + item.kv_head) * block_size +
                position % block_size;
      }
      const int boxes = (min(kTileTokens, item.seq_len - t * kTileTokens) + box - 1) / box;
      const int bytes = boxes * box * sm90::kSwizzleRow * L::kPanels;
      const uint32_t full = base + L::kStageBarriers + stage.at * 24;
      sm90::mbarrier_wait(full + 16, stage.phase ^ 1);
      if (lane == 0) {
        sm90::mbarrier_expect(full, bytes);
        sm90::mbarrier_expect(full + 8, bytes);
      }
      __syncwarp();
      const int piece = lane - in_look * boxes_a_tile;
      if (piece >= 0 && piece < boxes) {
        const uint32_t to =
            base + L::kRing + stage.at * L::kStageBytes + piece * box * sm90::kSwizzleRow;
#pragma unroll
        for (int part = 0; part < 2; ++part)
#pragma unroll
          for (int panel = 0; panel < L::kPanels; ++panel)
            sm90::tma_load(to + part * L::kTileBytes + panel * L::kPanelBytes, &work.map,
                           full + part * 8, 0, row + part * heads * block_size, panel, policy);
      }
      stage.advance();
    }
  }
}

// Three warps: copy the items' queries.
template <typename T, int kHeadDim>
__device__ __forceinline__ void serve_queries(const PrefillWork& w, uint32_t base,
                                              const PrefillItem* items) {
  using L = PrefillLayout<kHeadDim>;
  constexpr int kPieces = kHeadDim / 8;
  const int thread = threadIdx.x - (L::kThreads - kQueryThreads);
  RingPlace<L::kEntries> entry;
  while (true) {
    const uint32_t barriers = base + L::kEntryBarriers + entry.at * 24;
    sm90::mbarrier_wait(barriers, entry.phase);
    const PrefillItem item = items[entry.at];
    if (item.num_tiles > 0) {
      const QueryRows rows = item.rows(w);
      const uint32_t to = base + entry.at * L::kGroups * L::kTileBytes;
      const T* q = static_cast<const T*>(w.p.q);
      for (int i = thread; i < L::kRows * kPieces; i += kQueryThreads) {
        const int r = i / kPieces, piece = i % kPieces;
        const bool exists = rows.exists(item.first_row + r);
        const T* from = exists ? q + rows.offset(item.first_row + r, kHeadDim) + piece * 8 : q;
        copy_async(
            to + r / kGroupRows * L::kTileBytes + tile_offset<kHeadDim>(r % kGroupRows, piece),
            from, exists);
      }
      commit_copies();
      wait_copies<0>();
      async_proxy_fence();
    }
    __syncwarp();
    if (threadIdx.x % kWarpSize == 0) sm90::mbarrier_arrive(barriers + 8);
    entry.advance();
    if (item.num_tiles == 0) break;
  }
}

#endif  // MINIVLLM_SM90A

template <typename T, int kHeadDim>
static __global__ void __launch_bounds__(PrefillLayout<kHeadDim>::kThreads, 1)
    prefill_sm90_kernel(const __grid_constant__ PrefillSm90Work work) {
#ifdef MINIVLLM_SM90A
  using L = PrefillLayout<kHeadDim>;
  extern __shared__ uint8_t smem[];
  constexpr uint32_t kAlign = sm90::kSwizzleAtom - 1;
  const uint32_t unaligned = sm90::shared_address(smem);
  const uint32_t base = (unaligned + kAlign) & ~kAlign;
  PrefillItem* items = reinterpret_cast<PrefillItem*>(smem + (base - unaligned) + L::kItems);
  pdl_launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      const uint32_t barriers = base + L::kStageBarriers + i * 24;
      sm90::mbarrier_init(barriers, 1);
      sm90::mbarrier_init(barriers + 8, 1);
      sm90::mbarrier_init(barriers + 16, L::kConsumers / kWarpSize);
    }
    for (int i = 0; i < L::kEntries; ++i) {
      const uint32_t barriers = base + L::kEntryBarriers + i * 24;
      sm90::mbarrier_init(barriers, 1);
      sm90::mbarrier_init(barriers + 8, kQueryThreads / kWarpSize);
      sm90::mbarrier_init(barriers + 16, L::kConsumers);
    }
    sm90::mbarrier_init_fence();
  }
  pdl_wait();
  __syncthreads();
  if (threadIdx.x >= L::kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(L::kServerRegisters));
    if (threadIdx.x < L::kConsumers + kWarpSize) {
      serve_keys<kHeadDim>(work, base, items);
    } else {
      serve_queries<T, kHeadDim>(work.w, base, items);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(L::kComputeRegisters));
    compute<T, kHeadDim>(work.w, base, items);
  }
#endif
}

template <typename T, int kHeadDim>
static void launch_prefill_sm90(const AttentionParams& p, int group, Stream stream) {
  using L = PrefillLayout<kHeadDim>;
  constexpr int64_t kGroupBytes = int64_t{20} << 20;  // of keys and values: well inside L2
  const KvCache& kv = p.kv;
  PrefillSm90Work work = {};
  work.w.p = p;
  work.w.c = p.scale * kLog2e;
  work.w.group = group;
  work.w.group_tokens = kGroupBytes / (kv.num_kv_heads * kHeadDim * 4);
  work.map = sm90::k_block_map(
      kv.cache, p.dtype, kv.num_blocks * 2 * kv.num_kv_heads * kv.block_size, kHeadDim, kHeadDim,
      static_cast<int>(std::min<int64_t>(kv.block_size, kTileTokens)), 1);
  const int64_t items = max_query_tiles(p, group, L::kRows) * kv.num_kv_heads;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(num_sms(), items));
  MINIVLLM_LAUNCH(prefill_sm90_kernel<T, kHeadDim>, dim3(grid), dim3(L::kThreads), L::kBytes,
                  stream, work);
}

}  // namespace minivllm::cuda::attention
