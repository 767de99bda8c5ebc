// Prefill attention for Hopper: wgmma fed by TMA, the arithmetic of attention_common.cuh.
//
// Block = two warpgroups of 64 query rows and one warp that copies tiles of 64 keys and values into
// a ring. A warpgroup issues the scores of tile t and P v of tile t - 1, and works on tile t's
// softmax while P v and the other warpgroup's products run. The two take turns in issuing. Blocks
// stay: they walk over the (query tile, KV head) pairs in an order that starts with the longest.
//
// TMA reads the cache as rows of head_dim: a tile of 64 keys is one block, part of one, or some.
// Rows past a sequence's end may hold anything: keys are masked, values are overwritten with zeros.
// https://arxiv.org/abs/2407.08608
#pragma once

#include <algorithm>

#include "prefill_rows.cuh"
#include "sm90.cuh"
#include "wgmma_registers.cuh"

namespace minivllm::cuda::attention {

constexpr int kGroups = 2;  // consumer warpgroups
constexpr int kGroupRows = 64;
constexpr int kBlockRows = kGroups * kGroupRows;
constexpr int kConsumers = kGroups * sm90::kWarpgroupSize;
constexpr int kConsumerWarps = kConsumers / kWarpSize;
constexpr int kPrefillThreads = kConsumers + sm90::kWarpgroupSize;  // one of the last works
// Registers of a thread: what the copying warpgroup gives up the others take.
constexpr int kProducerRegisters = 56;
constexpr int kConsumerRegisters = 224;
constexpr int kPrefillMaxSeqs = 1024;
constexpr int kPanel = 64;                                    // head_dim of a swizzled panel
constexpr int kPanelBytes = kTileTokens * sm90::kSwizzleRow;  // 64 rows of it

constexpr bool has_prefill_sm90(int head_dim) { return head_dim == 64 || head_dim == 128; }

inline bool prefill_sm90_supported(const AttentionParams& p) {
  const int64_t size = p.kv.block_size;
  const bool boxes = size % kTileTokens == 0 || size == 8 || size == 16 || size == 32;
  constexpr int64_t kMaxCoordinate = int64_t{1} << 31;
  return compute_capability() == 90 && boxes && p.num_seqs <= kPrefillMaxSeqs &&
         p.kv.num_blocks * 2 * p.kv.num_kv_heads * size < kMaxCoordinate;
}

template <int kHeadDim>
struct PrefillLayout {
  static constexpr int kPanels = kHeadDim / kPanel;
  static constexpr int kTileBytes = kPanels * kPanelBytes;
  // Queries of a small head stay in registers; larger ones leave no room there.
  static constexpr bool kQueriesInRegisters = kHeadDim <= 64;
  static constexpr int kQueryBytes = kQueriesInRegisters ? 0 : kGroups * kTileBytes;
  static constexpr int kStages = kHeadDim <= 64 ? 8 : 5;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kRing = kQueryBytes;
  static constexpr int kBarriers = kRing + kStages * kStageBytes;
  static constexpr int kCounts = kBarriers + kStages * 3 * 8;
  static constexpr int bytes(int64_t num_seqs) {
    return kCounts + static_cast<int>(num_seqs + 1) * 4 + sm90::kSwizzleAtom;
  }
};

struct PrefillWork {
  AttentionParams p;
  float c;  // scale log2(e)
  int group;
  CUtensorMap map;  // the cache as [head_dim / 64][rows][64]
};

#ifdef MINIVLLM_SM90A

__device__ __forceinline__ void group_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void group_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// One unit of work: a query tile of one sequence and KV head.
struct PrefillItem {
  QueryRows rows;
  int slot;
  int first_row;
  int num_tiles;  // of keys
};

__device__ __forceinline__ PrefillItem prefill_item(const PrefillWork& w, const int* counts,
                                                    int index) {
  const int heads = static_cast<int>(w.p.kv.num_kv_heads);
  const int tile = index / heads, kv_head = index - tile * heads;
  int low = 0, high = static_cast<int>(w.p.num_seqs) - 1;  // the last s with counts[s] <= tile
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (counts[middle] <= tile) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  PrefillItem item;
  item.rows = query_rows(w.p, low, w.group, kv_head);
  item.slot = w.p.slots[low];
  item.first_row = (counts[low + 1] - 1 - tile) * kBlockRows;
  item.num_tiles =
      item.slot < 0 ? 0 : item.rows.position(item.first_row + kBlockRows - 1) / kTileTokens + 1;
  return item;
}

// Number of query tiles before each sequence; one warp.
__device__ __forceinline__ void count_query_tiles(const PrefillWork& w, int* counts) {
  const int lane = threadIdx.x % kWarpSize;
  const int num_seqs = static_cast<int>(w.p.num_seqs);
  int before = 0;
  if (lane == 0) counts[0] = 0;
  for (int base = 0; base < num_seqs; base += kWarpSize) {
    const int s = base + lane;
    const int q_len = s < num_seqs ? w.p.q_starts[s + 1] - w.p.q_starts[s] : 0;
    int through = (q_len * w.group + kBlockRows - 1) / kBlockRows;
#pragma unroll
    for (int offset = 1; offset < kWarpSize; offset *= 2) {
      const int other = __shfl_up_sync(kFullMask, through, offset);
      if (lane >= offset) through += other;
    }
    if (s < num_seqs) counts[s + 1] = before + through;
    before += __shfl_sync(kFullMask, through, kWarpSize - 1);
  }
}

// Item number `round` of this block, or -1: rounds alternate in direction, so that no block always
// gets the longest of its round.
__device__ __forceinline__ int round_item(int round, int num_items) {
  const int blocks = static_cast<int>(gridDim.x);
  const int at =
      round % 2 == 0 ? static_cast<int>(blockIdx.x) : blocks - 1 - static_cast<int>(blockIdx.x);
  const int index = round * blocks + at;
  return index < num_items ? index : -1;
}

template <int kHeadDim>
__device__ __forceinline__ void produce(const PrefillWork& w, const int* counts, int num_items,
                                        uint32_t ring, uint32_t barriers) {
  using L = PrefillLayout<kHeadDim>;
  const KvCache& kv = w.p.kv;
  const int heads = static_cast<int>(kv.num_kv_heads);
  const int block_size = static_cast<int>(kv.block_size);
  const int box = min(block_size, kTileTokens);
  const uint64_t policy = sm90::evict_normal_policy();
  sm90::prefetch_tensor_map(&w.map);
  int stage = 0;
  uint32_t phase = 0;
  const int rounds = (num_items + gridDim.x - 1) / gridDim.x;
  for (int round = 0; round < rounds; ++round) {
    const int index = round_item(round, num_items);
    if (index < 0) continue;
    const PrefillItem item = prefill_item(w, counts, index);
    const int32_t* table = kv.block_table + item.slot * kv.block_table_stride;
    for (int t = 0; t < item.num_tiles; ++t) {
      const uint32_t keys_full = barriers + stage * 24, values_full = keys_full + 8;
      sm90::mbarrier_wait(keys_full + 16, phase ^ 1);
      const int start = t * kTileTokens;
      const int boxes = (min(kTileTokens, item.rows.seq_len - start) + box - 1) / box;
      const int bytes = boxes * box * sm90::kSwizzleRow * L::kPanels;
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {  // keys, then values
        const uint32_t full = part == 0 ? keys_full : values_full;
        const uint32_t to = ring + stage * L::kStageBytes + part * L::kTileBytes;
        sm90::mbarrier_expect(full, bytes);
        for (int b = 0; b < boxes; ++b) {
          const int at = start + b * box;
          const int row =
              ((table[at / block_size] * 2 + part) * heads + item.rows.kv_head) * block_size +
              at % block_size;
#pragma unroll
          for (int panel = 0; panel < L::kPanels; ++panel)
            sm90::tma_load(to + panel * kPanelBytes + b * box * sm90::kSwizzleRow, &w.map, full, 0,
                           row, panel, policy);
        }
      }
      if (++stage == L::kStages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
}

template <typename T, int kHeadDim>
__device__ __forceinline__ void consume(const PrefillWork& w, const int* counts, int num_items,
                                        uint32_t queries, uint32_t ring, uint32_t barriers) {
  using L = PrefillLayout<kHeadDim>;
  constexpr int kOut = kHeadDim / 2;  // accumulators of a thread
  constexpr int kSteps = kHeadDim / kMmaDepth;
  const int lane = threadIdx.x % kWarpSize;
  const int thread = threadIdx.x % sm90::kWarpgroupSize;
  const int group = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / sm90::kWarpgroupSize, 0);
  const int own_turn = 1 + kGroups + group, other_turn = 1 + kGroups + (group ^ 1);
  const float c = w.c;
  int stage = 0;  // of the tile whose scores come next
  uint32_t phase = 0;
  if (group == 1) group_arrive(other_turn, kConsumers);

  const int rounds = (num_items + gridDim.x - 1) / gridDim.x;
  for (int round = 0; round < rounds; ++round) {
    const int index = round_item(round, num_items);
    if (index < 0) continue;
    const PrefillItem item = prefill_item(w, counts, index);
    const QueryRows& rows = item.rows;
    const int num_tiles = item.num_tiles;
    if (num_tiles == 0) continue;
    const int first = item.first_row + group * kGroupRows;
    const int row0 = first + thread / kWarpSize * kMmaRows + lane / 4, row1 = row0 + 8;
    const int last0 = rows.position(row0), last1 = rows.position(row1);
    const int first_masked = (rows.position(first) + 1) / kTileTokens;

    const T* source = static_cast<const T*>(w.p.q);
    uint32_t q[L::kQueriesInRegisters ? kSteps : 1][4];
    const uint32_t own_queries = queries + group * L::kTileBytes;
    if constexpr (L::kQueriesInRegisters) {
      load_queries<T, kHeadDim>(q,
                                rows.exists(row0) ? source + rows.offset(row0, kHeadDim) : nullptr,
                                rows.exists(row1) ? source + rows.offset(row1, kHeadDim) : nullptr);
    } else {
      constexpr int kPieces = kHeadDim / 8;
      for (int i = thread; i < kGroupRows * kPieces; i += sm90::kWarpgroupSize) {
        const int r = i / kPieces, piece = i % kPieces;
        uint4 word = make_uint4(0, 0, 0, 0);
        if (rows.exists(first + r))
          word = *reinterpret_cast<const uint4*>(source + rows.offset(first + r, kHeadDim) +
                                                 piece * 8);
        const uint32_t to = own_queries + piece / 8 * kPanelBytes + r * sm90::kSwizzleRow +
                            ((piece % 8) ^ (r % 8)) * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(word.x), "r"(word.y),
                     "r"(word.z), "r"(word.w)
                     : "memory");
      }
      async_proxy_fence();
      group_barrier(1 + group, sm90::kWarpgroupSize);
    }

    float s[kScores], o[kOut], total_o[kOut];
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f}, total_m[2], total_l[2];
    uint32_t p[kTileSteps][4];
    float factor[2];

    auto issue_scores = [&](uint32_t keys) {
      sm90::pin_registers(s);
      sm90::wgmma_fence();
      const uint32_t b = sm90::descriptor_low(keys);
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const uint32_t step = k / 4 * (kPanelBytes >> 4) + k % 4 * 2;
        if constexpr (L::kQueriesInRegisters) {
          wgmma_registers<T, false>(s, q[k], sm90::descriptor(b + step), k != 0);
        } else {
          sm90::wgmma<T>(s, sm90::descriptor(sm90::descriptor_low(own_queries) + step),
                         sm90::descriptor(b + step), k != 0);
        }
      }
      sm90::wgmma_commit();
    };
    auto issue_values = [&](uint32_t values, bool fresh) {
      sm90::pin_registers(o);
      sm90::wgmma_fence();
#pragma unroll
      for (int k = 0; k < kTileSteps; ++k)
        wgmma_registers<T, true>(
            o, p[k], transposed_descriptor(values + k * 2 * sm90::kSwizzleAtom, kPanelBytes),
            k != 0 || !fresh);
      sm90::wgmma_commit();
    };
    // Scores of tile t, which have arrived, to probabilities.
    auto soften = [&](int t) {
      const int start = t * kTileTokens;
      if (t >= first_masked) mask_scores(s, last0 - start, last1 - start);
      const float top0 = fmaxf(m[0], max_score<0>(s)), top1 = fmaxf(m[1], max_score<1>(s));
      const float shift0 = exponent_shift(top0, c), shift1 = exponent_shift(top1, c);
      factor[0] = rescale_factor(m[0], c, shift0);
      factor[1] = rescale_factor(m[1], c, shift1);
      m[0] = top0;
      m[1] = top1;
      l[0] = add_tile(l[0], factor[0], exponentiate<0>(s, c, shift0));
      l[1] = add_tile(l[1], factor[1], exponentiate<1>(s, c, shift1));
    };
    auto to_operands = [&] {
#pragma unroll
      for (int k = 0; k < kTileSteps; ++k) probability_operand<T>(p[k], s, k);
    };
    // Adds the split in o, whose maximum and sum are given, to the row.
    auto end_split = [&](bool is_first, const float (&split_m)[2], const float (&split_l)[2]) {
      if (is_first) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          total_m[h] = split_m[h];
          total_l[h] = quad_sum(split_l[h]);
        }
#pragma unroll
        for (int i = 0; i < kOut; ++i) total_o[i] = o[i];
      } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Merge merge =
              merge_split(total_m[h], total_l[h], split_m[h], quad_sum(split_l[h]), c);
#pragma unroll
          for (int i = 0; i < kOut; ++i)
            if (i % 4 / 2 == h) total_o[i] = merge_value(merge, total_o[i], o[i]);
        }
      }
    };
    // The tile's values may lie past the sequence's end.
    auto clear_values = [&](int t, uint32_t values) {
      const int valid = rows.seq_len - t * kTileTokens;
      if (valid >= kTileTokens) return;
      for (int i = thread; i < (kTileTokens - valid) * 8 * L::kPanels; i += sm90::kWarpgroupSize) {
        const int panel = i % L::kPanels, piece = i / L::kPanels % 8;
        const int r = valid + i / (8 * L::kPanels);
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                         values + panel * kPanelBytes + r * sm90::kSwizzleRow + piece * 16),
                     "r"(0)
                     : "memory");
      }
      async_proxy_fence();
      group_barrier(1 + group, sm90::kWarpgroupSize);
    };

    uint32_t keys = ring + stage * L::kStageBytes;
    sm90::mbarrier_wait(barriers + stage * 24, phase);
    issue_scores(keys);
    sm90::wgmma_wait<0>();
    sm90::pin_registers(s);
    soften(0);
    to_operands();

#pragma unroll 1
    for (int t = 1; t < num_tiles; ++t) {
      const uint32_t before = barriers + stage * 24, values = keys + L::kTileBytes;
      const uint32_t values_phase = phase;
      if (++stage == L::kStages) {
        stage = 0;
        phase ^= 1;
      }
      keys = ring + stage * L::kStageBytes;
      sm90::mbarrier_wait(barriers + stage * 24, phase);
      sm90::mbarrier_wait(before + 8, values_phase);
      group_barrier(own_turn, kConsumers);
      issue_scores(keys);
      issue_values(values, (t - 1) % kTilesPerSplit == 0);
      group_arrive(other_turn, kConsumers);
      sm90::wgmma_wait<1>();
      sm90::pin_registers(s);
      const bool new_split = t % kTilesPerSplit == 0;
      const float split_m[2] = {m[0], m[1]}, split_l[2] = {l[0], l[1]};
      if (new_split) {
        m[0] = m[1] = -INFINITY;
        l[0] = l[1] = 0.f;
      }
      soften(t);
      sm90::wgmma_wait<0>();
      sm90::pin_registers(o);
      if (lane == 0) sm90::mbarrier_arrive(before + 16);
      to_operands();
      if (new_split) {
        end_split(t == kTilesPerSplit, split_m, split_l);
      } else {
#pragma unroll
        for (int i = 0; i < kOut; ++i) o[i] = __fmul_rn(o[i], factor[i % 4 / 2]);
      }
    }
    const uint32_t before = barriers + stage * 24;
    sm90::mbarrier_wait(before + 8, phase);
    clear_values(num_tiles - 1, keys + L::kTileBytes);
    issue_values(keys + L::kTileBytes, (num_tiles - 1) % kTilesPerSplit == 0);
    sm90::wgmma_wait<0>();
    sm90::pin_registers(o);
    if (lane == 0) sm90::mbarrier_arrive(before + 16);
    if (++stage == L::kStages) {
      stage = 0;
      phase ^= 1;
    }
    end_split(num_tiles <= kTilesPerSplit, m, l);

#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = h == 0 ? row0 : row1;
      if (!rows.exists(row)) continue;
      T* out = static_cast<T*>(w.p.out) + rows.offset(row, kHeadDim) + 2 * (lane % 4);
      const float inverse = inverse_sum(total_l[h]);
#pragma unroll
      for (int b = 0; b < kHeadDim / 8; ++b)
        *reinterpret_cast<uint32_t*>(out + 8 * b) =
            pack<T>(normalise(total_o[4 * b + 2 * h], inverse),
                    normalise(total_o[4 * b + 2 * h + 1], inverse));
    }
  }
}

#endif  // MINIVLLM_SM90A

template <typename T, int kHeadDim>
static __global__ void __launch_bounds__(kPrefillThreads, 1)
    prefill_sm90_kernel(const __grid_constant__ PrefillWork w) {
#ifdef MINIVLLM_SM90A
  using L = PrefillLayout<kHeadDim>;
  extern __shared__ uint8_t smem[];
  constexpr uint32_t kAlign = sm90::kSwizzleAtom - 1;
  const uint32_t unaligned = sm90::shared_address(smem);
  const uint32_t base = (unaligned + kAlign) & ~kAlign;
  const uint32_t barriers = base + L::kBarriers;
  int* counts = reinterpret_cast<int*>(smem + (base - unaligned) + L::kCounts);
  pdl_launch_dependents();
  if (threadIdx.x == 0) {
    for (int i = 0; i < L::kStages; ++i) {
      sm90::mbarrier_init(barriers + i * 24, 1);                    // keys are there
      sm90::mbarrier_init(barriers + i * 24 + 8, 1);                // values are there
      sm90::mbarrier_init(barriers + i * 24 + 16, kConsumerWarps);  // both have been read
    }
    sm90::mbarrier_init_fence();
  }
  pdl_wait();
  if (threadIdx.x / kWarpSize == kConsumerWarps) count_query_tiles(w, counts);
  __syncthreads();
  const int num_items = counts[w.p.num_seqs] * static_cast<int>(w.p.kv.num_kv_heads);
  if (threadIdx.x >= kConsumers) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kProducerRegisters));
    if (threadIdx.x == kConsumers)
      produce<kHeadDim>(w, counts, num_items, base + L::kRing, barriers);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kConsumerRegisters));
    consume<T, kHeadDim>(w, counts, num_items, base, base + L::kRing, barriers);
  }
#endif
}

template <typename T, int kHeadDim>
static void launch_prefill_sm90(const AttentionParams& p, int group, Stream stream) {
  const KvCache& kv = p.kv;
  PrefillWork w = {};
  w.p = p;
  w.c = p.scale * kLog2e;
  w.group = group;
  w.map = sm90::k_block_map(kv.cache, p.dtype, kv.num_blocks * 2 * kv.num_kv_heads * kv.block_size,
                            kHeadDim, kHeadDim,
                            static_cast<int>(std::min<int64_t>(kv.block_size, kTileTokens)), 1);
  const int64_t items = max_query_tiles(p, group, kBlockRows) * kv.num_kv_heads;
  const auto grid = static_cast<unsigned>(std::min<int64_t>(num_sms(), items));
  MINIVLLM_LAUNCH(prefill_sm90_kernel<T, kHeadDim>, dim3(grid), dim3(kPrefillThreads),
                  PrefillLayout<kHeadDim>::bytes(p.num_seqs), stream, w);
}

}  // namespace minivllm::cuda::attention
