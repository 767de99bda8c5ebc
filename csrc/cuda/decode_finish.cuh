// What becomes of a split's result in decode attention: splits of a row that lie in one block merge
// in registers; the splits of a row that two blocks share lie in the workspace until the last block
// to arrive merges them in order. Neither needs more than one warp.
#pragma once

#include "decode_work.cuh"

namespace minivllm::cuda::attention {

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
      named_arrive(from_start ? kGoesOn : kBeganBefore, kDecodeComputeThreads + kWarpSize);
    }
    from_start = true;
  }
};

// One warp, after the block's `arrived` splits of a cut row have reached the workspace: counts
// them, and merges the row's partials in order if no split is missing. A lane has kPairs pairs of
// columns at once.
template <typename T, int kHeadDim, int kPairs>
__device__ __forceinline__ void finish_cut_row(const DecodeWork& w, const int* counts,
                                               const Share& share, const DecodeItem& row,
                                               int arrived) {
  constexpr int kAhead = 8 / kPairs;  // partials on their way at once
  const int lane = threadIdx.x % kWarpSize;
  const int num_splits = row.num_splits();
  const int row_first = row.first - row.split * kTilesPerSplit;
  const int owner = share.owner(row_first);
  int32_t* counter = static_cast<int32_t*>(w.p.workspace) + owner * w.head_tiles + row.head_tile;
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
  const int pairs = rows * kHeadDim / 2;
  for (int base = lane; base < pairs; base += kPairs * kWarpSize) {
    int pair[kPairs];
#pragma unroll
    for (int k = 0; k < kPairs; ++k) pair[k] = min(base + k * kWarpSize, pairs - 1);
    // No branch lies between the loads, so all are on their way at once.
    auto load = [&](int64_t split, float (&pm)[kPairs], float (&pl)[kPairs], float2(&po)[kPairs]) {
      const float* from = first + split * step;
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        const int head = pair[k] / (kHeadDim / 2);
        pm[k] = __ldcg(from + head);
        pl[k] = __ldcg(from + rows + head);
        po[k] = __ldcg(reinterpret_cast<const float2*>(from + 2 * rows) + pair[k]);
      }
    };
    float m[kPairs], l[kPairs];
    float2 o[kPairs];
    load(0, m, l, o);
    for (int i = owned; i < num_splits; i += kAhead) {
      float split_m[kAhead][kPairs], split_l[kAhead][kPairs];
      float2 split_o[kAhead][kPairs];
#pragma unroll
      for (int j = 0; j < kAhead; ++j)
        load(min(i + j, num_splits - 1), split_m[j], split_l[j], split_o[j]);
#pragma unroll
      for (int j = 0; j < kAhead; ++j) {
        if (i + j >= num_splits) break;
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
      if (base + k * kWarpSize >= pairs) continue;
      const float inverse = inverse_sum(l[k]);
      reinterpret_cast<uint32_t*>(out)[pair[k]] =
          pack<T>(normalise(o[k].x, inverse), normalise(o[k].y, inverse));
    }
  }
}

// One warp: sees to the rows that the block's share cuts at its two ends.
template <typename T, int kHeadDim>
__device__ __forceinline__ void finish_rows(const DecodeWork& w, const int* counts,
                                            const Share& share, const DecodeItem& first) {
  const DecodeItem after = share.find(counts, share.run + 1);
  bool same = false;
  if (first.split != 0) {
    same = after.split != 0 && after.seq == first.seq;
    named_barrier(kBeganBefore, kDecodeComputeThreads + kWarpSize);
    finish_cut_row<T, kHeadDim, 2>(w, counts, share, first,
                                   (same ? after.split : first.num_splits()) - first.split);
  }
  if (after.split != 0 && !same) {
    named_barrier(kGoesOn, kDecodeComputeThreads + kWarpSize);
    finish_cut_row<T, kHeadDim, 2>(w, counts, share, after, after.split);
  }
}

}  // namespace minivllm::cuda::attention
