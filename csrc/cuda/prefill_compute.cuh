// The computing warpgroups of the Hopper prefill kernel, and the shared memory that they and the
// serving warps meet in. Overview in prefill_sm90.cuh.
#pragma once

#include "prefill_schedule.cuh"
#include "wgmma_registers.cuh"

namespace minivllm::cuda::attention {

constexpr int kGroupRows = 64;  // query rows of a computing warpgroup
constexpr int kQueryThreads = sm90::kWarpgroupSize - kWarpSize;

template <int kHeadDim>
struct PrefillLayout {
  static constexpr int kPanelBytes = kTileTokens * sm90::kSwizzleRow;  // 64 rows of 64 columns
  static constexpr int kPanels = kHeadDim * 2 / sm90::kSwizzleRow;
  static constexpr int kTileBytes = kPanels * kPanelBytes;
  // Small heads leave registers for a third computing warpgroup, whose products fill the gaps that
  // the softmax of two leaves.
  static constexpr int kGroups = kHeadDim <= 64 ? 3 : 2;
  static constexpr int kRows = kGroups * kGroupRows;
  static constexpr int kConsumers = kGroups * sm90::kWarpgroupSize;
  static constexpr int kThreads = kConsumers + sm90::kWarpgroupSize;
  static constexpr int kEntries = 2;  // items whose queries are here
  static constexpr int kStages = kHeadDim <= 64 ? 8 : 4;
  // Registers of a thread: what the serving warpgroup gives up the others take.
  static constexpr int kServerRegisters = 56;
  static constexpr int kComputeRegisters = kGroups == 3 ? 152 : 224;
  static constexpr int kStageBytes = 2 * kTileBytes;
  static constexpr int kRing = kEntries * kGroups * kTileBytes;
  static constexpr int kItems = kRing + kStages * kStageBytes;
  // Of each stage: keys are there, values are there, both have been read. Of each entry: the item
  // is there, its queries are there, both have been read.
  static constexpr int kStageBarriers = kItems + kEntries * static_cast<int>(sizeof(PrefillItem));
  static constexpr int kEntryBarriers = kStageBarriers + kStages * 24;
  static constexpr int kBytes = kEntryBarriers + kEntries * 24 + sm90::kSwizzleAtom;
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

// The same number, in a register of the warp: wgmma takes its descriptors from those, and moving
// them there one by one would hold up the warps that wait for their turn.
__device__ __forceinline__ uint32_t uniform(uint32_t x) { return __reduce_max_sync(kFullMask, x); }

// A place in a ring and the parity of its current phase.
template <int kSize>
struct RingPlace {
  int at = 0;
  uint32_t phase = 0;
  __device__ void advance() {
    if (++at == kSize) {
      at = 0;
      phase ^= 1;
    }
  }
};

// What a computing thread knows of the item whose scores come next.
struct PrefillRows {
  int num_tiles, first_masked;
  int valid;         // values of the last tile that exist
  int last0, last1;  // the last keys that its two rows see
  int out0, out1;    // where they go, in heads of out; -1: nowhere
};

template <typename T, int kHeadDim>
__device__ __forceinline__ void compute(const PrefillWork& w, uint32_t base,
                                        const PrefillItem* items) {
  using L = PrefillLayout<kHeadDim>;
  constexpr int kOut = kHeadDim / 2;  // accumulators of a thread
  constexpr int kSteps = kHeadDim / kMmaDepth;
  const int lane = threadIdx.x % kWarpSize;
  const int thread = threadIdx.x % sm90::kWarpgroupSize;
  const int group = __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / sm90::kWarpgroupSize, 0);
  constexpr int kTurnThreads = 2 * sm90::kWarpgroupSize;  // who waits, and who gives the turn
  const int own_turn = 1 + L::kGroups + group;
  const int next_turn = 1 + L::kGroups + (group + 1) % L::kGroups;
  const float c = w.c;

  uint32_t queries = 0;
  RingPlace<L::kEntries> entry;
  auto load_item = [&] {
    sm90::mbarrier_wait(base + L::kEntryBarriers + entry.at * 24, entry.phase);
    sm90::mbarrier_wait(base + L::kEntryBarriers + entry.at * 24 + 8, entry.phase);
    const PrefillItem item = items[entry.at];
    PrefillRows r = {};
    r.num_tiles = item.num_tiles;
    if (r.num_tiles == 0) return r;
    const QueryRows rows = item.rows(w);
    const int first = item.first_row + group * kGroupRows;
    const int row0 = first + thread / kWarpSize * kMmaRows + lane / 4, row1 = row0 + 8;
    r.first_masked = (rows.position(first) + 1) / kTileTokens;
    r.valid = item.seq_len - (item.num_tiles - 1) * kTileTokens;
    r.last0 = rows.position(row0);
    r.last1 = rows.position(row1);
    r.out0 = rows.exists(row0) ? static_cast<int>(rows.offset(row0, 1)) : -1;
    r.out1 = rows.exists(row1) ? static_cast<int>(rows.offset(row1, 1)) : -1;
    queries = base + (entry.at * L::kGroups + group) * L::kTileBytes;
    return r;
  };
  // After the item's last scores. Every thread for itself: each has read the item, and racecheck
  // does not see that one lane arrives for a warp.
  auto release_queries = [&] {
    sm90::mbarrier_arrive(base + L::kEntryBarriers + entry.at * 24 + 16);
    entry.advance();
  };

  float s[kScores], o[kOut], total_o[kOut];
  float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f}, total_m[2], total_l[2];
  uint32_t p[kTileSteps][4];
  float factor[2];

  // a, b, values: low words of descriptors.
  auto issue_scores = [&](uint32_t a, uint32_t b) {
    sm90::pin_registers(s);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const uint32_t step = k / 4 * (L::kPanelBytes >> 4) + k % 4 * 2;
      sm90::wgmma<T>(s, sm90::descriptor(a + step), sm90::descriptor(b + step), k != 0);
    }
    sm90::wgmma_commit();
  };
  auto issue_values = [&](uint32_t values, bool fresh) {
    sm90::pin_registers(o);
    sm90::wgmma_fence();
#pragma unroll
    for (int k = 0; k < kTileSteps; ++k)
      wgmma_registers<T, true>(
          o, p[k], sm90::descriptor(values + k * (2 * sm90::kSwizzleAtom >> 4)), k != 0 || !fresh);
    sm90::wgmma_commit();
  };
  // Scores of tile t, which have arrived, to probabilities.
  auto soften = [&](int t, const PrefillRows& r) {
    const int start = t * kTileTokens;
    if (t >= r.first_masked) mask_scores(s, r.last0 - start, r.last1 - start);
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
  auto clear_values = [&](int valid, uint32_t values) {
    for (int i = valid * 8 + thread; i < kTileTokens * 8; i += sm90::kWarpgroupSize)
#pragma unroll
      for (int panel = 0; panel < L::kPanels; ++panel)
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(values + i * 16 +
                                                                      panel * L::kPanelBytes),
                     "r"(0)
                     : "memory");
    async_proxy_fence();
    group_barrier(1 + group, sm90::kWarpgroupSize);
  };

  PrefillRows now = load_item();
  if (now.num_tiles == 0) return;
  if (group == L::kGroups - 1) group_arrive(next_turn, kTurnThreads);
  RingPlace<L::kStages> stage;
  sm90::mbarrier_wait(base + L::kStageBarriers, 0);
  issue_scores(uniform(sm90::descriptor_low(queries)),
               uniform(sm90::descriptor_low(base + L::kRing)));
  sm90::wgmma_wait<0>();
  sm90::pin_registers(s);
  if (now.num_tiles == 1) release_queries();
  soften(0, now);
  to_operands();

  int t = 0;
#pragma unroll 1
  while (true) {
    // Tile t of the item `now` has its probabilities; the next tile may be another item's.
    const bool item_ends = t + 1 == now.num_tiles;
    const bool split_ends = item_ends || (t + 1) % kTilesPerSplit == 0;
    const int out0 = now.out0, out1 = now.out1;
    const int valid = item_ends ? now.valid : kTileTokens;
    const int next_t = item_ends ? 0 : t + 1;
    if (item_ends) now = load_item();
    const bool more = now.num_tiles != 0;

    const uint32_t barriers = base + L::kStageBarriers + stage.at * 24;
    const uint32_t values = base + L::kRing + stage.at * L::kStageBytes + L::kTileBytes;
    const uint32_t values_phase = stage.phase;
    stage.advance();
    if (more) sm90::mbarrier_wait(base + L::kStageBarriers + stage.at * 24, stage.phase);
    sm90::mbarrier_wait(barriers + 8, values_phase);
    if (valid < kTileTokens) clear_values(valid, values);
    const uint32_t a = uniform(sm90::descriptor_low(queries));
    const uint32_t b = uniform(sm90::descriptor_low(base + L::kRing + stage.at * L::kStageBytes));
    const uint32_t v = uniform(transposed_descriptor_low(values, L::kPanelBytes));
    group_barrier(own_turn, kTurnThreads);
    // After the last item these are scores of old keys, which nobody uses: a branch around a wgmma
    // would make the compiler wait for each.
    issue_scores(a, b);
    issue_values(v, t % kTilesPerSplit == 0);
    group_arrive(next_turn, kTurnThreads);

    const float split_m[2] = {m[0], m[1]}, split_l[2] = {l[0], l[1]};
    if (split_ends) {
      m[0] = m[1] = -INFINITY;
      l[0] = l[1] = 0.f;
    }
    sm90::wgmma_wait<1>();
    sm90::pin_registers(s);
    if (next_t + 1 == now.num_tiles) release_queries();
    soften(next_t, now);
    sm90::wgmma_wait<0>();
    sm90::pin_registers(o);
    if (lane == 0) sm90::mbarrier_arrive(barriers + 16);
    to_operands();
    if (split_ends) {
      end_split(t < kTilesPerSplit, split_m, split_l);
      if (item_ends) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = h == 0 ? out0 : out1;
          if (row < 0) continue;
          T* out = static_cast<T*>(w.p.out) + static_cast<int64_t>(row) * kHeadDim + 2 * (lane % 4);
          const float inverse = inverse_sum(total_l[h]);
#pragma unroll
          for (int b = 0; b < kHeadDim / 8; ++b)
            *reinterpret_cast<uint32_t*>(out + 8 * b) =
                pack<T>(normalise(total_o[4 * b + 2 * h], inverse),
                        normalise(total_o[4 * b + 2 * h + 1], inverse));
        }
        if (!more) break;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kOut; ++i) o[i] = __fmul_rn(o[i], factor[i % 4 / 2]);
    }
    t = next_t;
  }
}

#endif  // MINIVLLM_SM90A

}  // namespace minivllm::cuda::attention
