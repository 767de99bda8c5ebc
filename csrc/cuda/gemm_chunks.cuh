// How a warpgroup multiplies the stages of the ring, and how one that walks all chunks of K adds
// their sums up. See gemm_sm90.cuh.
#pragma once

#include "gemm_staged.cuh"
#include "wgmma.cuh"

namespace minivllm::cuda::gemm {

// A warpgroup's place in the ring. One stage is held while the next is multiplied.
template <typename S>
class Ring {
 public:
  // x: of this warpgroup's rows.
  __device__ __forceinline__ Ring(const Problem& p, uint32_t x, uint32_t weight, uint32_t full,
                                  uint32_t empty, int lane)
      : full_(full),
        empty_(empty),
        remote_empty_(S::kShare > 1 ? sm90::map_to_rank(empty, lane % S::kShare) : empty),
        lane_(lane),
        x_block_(p.x.stage_rows * kRowUnits),
        x_first_(sm90::descriptor_low(x)),
        weight_first_(sm90::descriptor_low(weight)),
        weight_(weight),
        x_slot_(x_first_),
        weight_slot_(weight_first_) {}

  __device__ __forceinline__ void wait() const { sm90::mbarrier_wait(full_ + 8 * slot_, parity_); }
  // On to the next slot; the one left is held.
  __device__ __forceinline__ void next(const Problem& p) {
    held_ = slot_;
    x_slot_ += S::kBlocks * x_block_;
    weight_slot_ += S::kBlocks * kWeightBlock;
    if (++slot_ == p.stages)
      slot_ = 0, parity_ ^= 1, x_slot_ = x_first_, weight_slot_ = weight_first_;
  }
  __device__ __forceinline__ void release_held() const { release(held_); }
  // To the producers of all CTAs that copy into the slot.
  __device__ __forceinline__ void release(int slot) const {
    if constexpr (S::kShare == 1) {
      if (lane_ == 0) sm90::mbarrier_arrive(empty_ + 8 * slot);
    } else {
      if (lane_ < S::kShare) sm90::mbarrier_arrive_remote(remote_empty_ + 8 * slot);
    }
  }
  __device__ __forceinline__ int slot() const { return slot_; }
  // The slot's weights, or what is in their place.
  __device__ __forceinline__ uint32_t weight_address() const {
    return weight_ + slot_ * (S::kBlocks * S::kN * sm90::kSwizzleRow);
  }

  // acc += the stage's products, or = where a chain starts.
  template <typename T, bool kStarts = false>
  __device__ __forceinline__ void multiply(float (&acc)[S::kN / 2]) const {
    sm90::pin_registers(acc);
    sm90::wgmma_fence();
    uint32_t x = x_slot_, weight = weight_slot_;
#pragma unroll
    for (int block = 0; block < S::kBlocks; ++block) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const bool overwrites = kStarts && block == 0 && step == 0;
        sm90::wgmma<T>(acc, sm90::descriptor(x + 2 * step), sm90::descriptor(weight + 2 * step),
                       overwrites ? 0 : 1);
      }
      x += x_block_;
      weight += kWeightBlock;
    }
    sm90::wgmma_commit();
  }

 private:
  static constexpr uint32_t kWeightBlock = S::kN * kRowUnits;
  uint32_t full_, empty_, remote_empty_;
  int lane_;
  uint32_t x_block_, x_first_, weight_first_, weight_, x_slot_, weight_slot_;
  int slot_ = 0, held_ = 0;
  uint32_t parity_ = 0;
};

// ---- all chunks of K ------------------------------------------------------------------------

constexpr int kParkedStride = sm90::kWarpgroupSize * static_cast<int>(sizeof(float));

// Adds a chunk's sums to those of the chunks before, in kept and at parked: what is parked comes
// back into acc's tail.
template <typename S>
__device__ __forceinline__ void add_chunk_sums(float (&acc)[S::kN / 2], float (&kept)[S::kKept],
                                               uint32_t parked, bool is_first) {
#pragma unroll
  for (int i = 0; i < S::kKept; ++i) kept[i] = is_first ? acc[i] : kept[i] + acc[i];
  if (is_first) return;
#pragma unroll
  for (int i = S::kKept; i < S::kN / 2; i += 4) {
    float v[4];
    sm90::load_shared(v, parked + (i - S::kKept) * kParkedStride);
#pragma unroll
    for (int j = 0; j < 4; ++j) acc[i + j] = v[j] + acc[i + j];
  }
}
template <typename S>
__device__ __forceinline__ void park_sums(const float (&acc)[S::kN / 2], uint32_t parked) {
#pragma unroll
  for (int i = S::kKept; i < S::kN / 2; i += 4)
    sm90::store_shared(parked + (i - S::kKept) * kParkedStride, acc + i);
}

// A tile whose chunks of K one CTA walks: each is a chain from zero.
template <typename T, typename S>
__device__ __forceinline__ void multiply_chunks(float (&acc)[S::kN / 2], Ring<S>& ring,
                                                const Problem& p, Exit& exit) {
  float kept[S::kKept];
  const int thread = threadIdx.x % sm90::kWarpgroupSize;
  const uint32_t parked = exit.buffers + thread * 16;
  for (int first = 0; first < p.tile_stages; first += p.chunk_stages) {
    ring.wait();
    ring.template multiply<T, true>(acc);
    ring.next(p);
    for (int stage = 1; stage < p.chunk_stages; ++stage) {
      ring.wait();
      ring.template multiply<T>(acc);
      sm90::wgmma_wait<1>();
      ring.release_held();
      ring.next(p);
    }
    sm90::wgmma_wait<0>();
    sm90::pin_registers(acc);
    ring.release_held();
    add_chunk_sums<S>(acc, kept, parked, first == 0);
    if (first + p.chunk_stages == p.tile_stages) break;
    if (S::kParked > 0 && first == 0) exit.drain(thread);  // of the tile before
    park_sums<S>(acc, parked);
  }
#pragma unroll
  for (int i = 0; i < S::kKept; ++i) acc[i] = kept[i];
}

}  // namespace minivllm::cuda::gemm
