// out = x W^T for Hopper: the tokens are wgmma's 64-row operand and the weight's rows its columns.
//
// A CTA owns tiles of [64 * kWarpgroups tokens, kN columns]. K is cut into chunks by the shape of
// the weight alone; each is one chain of k16 steps into one float accumulator, and the chunks' sums
// are added in order, so the bits of an output depend neither on the tile nor on how many tokens
// there are. For few tokens a chunk is a tile of its own, more CTAs pull weights, and the next
// kernel adds the sums; for many one CTA walks all chunks of a tile (kSums). One warp copies stages
// (k-blocks of 64 elements: token rows and weight rows) into a ring; one or two warpgroups
// multiply. Rows behind the last token are not copied: in the operand they are whatever is there in
// shared memory, and what comes of those rows is never stored. (A copy fills rows outside of the
// matrix with zeros, but much slower than it copies others.)
//
// Two CTAs of a cluster may work on neighbouring tiles in step: each copies half of the operand
// that they have in common, to both. That takes load from L2, which bounds products of 65 tokens
// on.
//
// Weights do not depend on the kernel before, so the ring is filled with them before pdl_wait.
#pragma once

#include "gemm_copy.cuh"
#include "gemm_staged.cuh"

namespace minivllm::cuda::gemm {

template <typename T, int kTokens, int kN, int kBlocks, int kCluster, bool kSums>
__device__ __forceinline__ void consume(const Problem& p, uint32_t x_ring, uint32_t weight_ring,
                                        uint32_t staging, uint32_t full, uint32_t empty) {
  // Shuffled so that the compiler knows it to be the same in a warp: descriptors need that.
  const int warpgroup = __shfl_sync(kFullMask, threadIdx.x / sm90::kWarpgroupSize, 0);
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x % sm90::kWarpgroupSize / kWarpSize;
  const uint32_t x_first =
      sm90::descriptor_low(x_ring + warpgroup * kTileTokens * sm90::kSwizzleRow);
  const uint32_t weight_first = sm90::descriptor_low(weight_ring);
  const uint32_t x_block = p.x.stage_rows * kRowUnits;
  constexpr uint32_t kWeightBlock = kN * kRowUnits;
  pdl_wait();  // out may be the kernel before's input, or its output

  constexpr bool kIsStaged = kStaged<kTokens, kN>;
  [[maybe_unused]] Exit exit{&p.out, staging + warpgroup * kChunkBuffers * kChunkBytes, warpgroup};
  [[maybe_unused]] Ahead ahead;
  [[maybe_unused]] uint32_t old[kN / 4];
  const bool residual = p.output.epilogue == Epilogue::kResidual;
  [[maybe_unused]] const uint32_t remote_empty =
      kCluster > 1 ? sm90::map_to_rank(empty, lane % kCluster) : empty;
  float acc[kN / 2];
  [[maybe_unused]] float total[kSums ? kN / 2 : 1];
  int slot = 0, held = 0;
  uint32_t parity = 0, x_slot = x_first, weight_slot = weight_first;
  const auto release = [&](int from) {  // to the producers of all CTAs that copy into the slot
    if constexpr (kCluster == 1) {
      if (lane == 0) sm90::mbarrier_arrive(empty + 8 * from);
    } else {
      if (lane < kCluster) sm90::mbarrier_arrive_remote(remote_empty + 8 * from);
    }
  };
  for (Cursor<kTokens, kN, kCluster> tiles(p); !tiles.done(p); tiles.next_tile(p)) {
    const Place at = {tiles.tile.token + warpgroup * kTileTokens, tiles.tile.column, warp, lane};
    const auto load_residual = [&] {
      if (!residual) return;
      if constexpr (kIsStaged) {
        load_chunk<T>(ahead.old[0], p.output, at, 0);
        load_chunk<T>(ahead.old[1], p.output, at, 1);
      } else {
        load_pairs<T, kN>(old, p.output, at);
      }
    };
    if constexpr (!kSums) load_residual();  // travels while the tile is multiplied
    const int chunk_stages = kSums ? p.chunk_stages : p.tile_stages;
    for (int first = 0; first < p.tile_stages; first += chunk_stages) {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) acc[i] = 0.0f;
      for (int stage = 0; stage < chunk_stages; ++stage) {
        sm90::mbarrier_wait(full + 8 * slot, parity);
        sm90::pin_registers(acc);
        sm90::wgmma_fence();
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
            sm90::wgmma<T>(acc, sm90::descriptor(x_slot + 2 * step),
                           sm90::descriptor(weight_slot + 2 * step), 1);
          }
          x_slot += x_block;
          weight_slot += kWeightBlock;
        }
        sm90::wgmma_commit();
        if (stage > 0) {
          sm90::wgmma_wait<1>();
          release(held);
        }
        held = slot;
        if (++slot == p.stages) slot = 0, parity ^= 1, x_slot = x_first, weight_slot = weight_first;
      }
      sm90::wgmma_wait<0>();
      sm90::pin_registers(acc);
      release(held);
      if constexpr (kSums) {
#pragma unroll
        for (int i = 0; i < kN / 2; ++i) total[i] = first == 0 ? acc[i] : total[i] + acc[i];
      } else {
        break;
      }
    }
    if constexpr (kSums) {  // there were no registers for the residual before
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) acc[i] = total[i];
      load_residual();
    }
    if (p.output.bias != nullptr) add_bias<T, kN>(acc, p.output, at);
    if constexpr (kIsStaged) {
      store_staged<T, kN>(acc, ahead, exit, p.output, at);
    } else {
      Output output = p.output;
      if (p.chunks > 1) {  // each chunk's sums are a matrix of their own
        const int64_t size = output.stride * output.num_tokens;
        output.out = static_cast<float*>(output.out) + tiles.tile.chunk * size;
      }
      store_pairs<T, kN>(acc, old, output, at);
    }
  }
  if constexpr (kIsStaged) {  // shared memory must outlive the copies' reads
    if (threadIdx.x % sm90::kWarpgroupSize == 0) sm90::bulk_wait_read<0>();
  }
}

template <typename T, int kWarpgroups, int kN, int kBlocks, int kCluster, bool kSums>
__device__ __forceinline__ void gemm_cta(const Problem& p) {
#if defined(MINIVLLM_SM90A)
  extern __shared__ __align__(sm90::kSwizzleAtom) uint8_t shared[];
  constexpr int kTokens = kWarpgroups * kTileTokens;
  constexpr int kMultiplyWarps = kWarpgroups * sm90::kWarpgroupSize / kWarpSize;
  // The tokens' ring comes first: the operand's rows behind it are then the weights'.
  const uint32_t x_ring = sm90::shared_address(shared);
  const uint32_t weight_ring = x_ring + p.stages * kBlocks * p.x.stage_rows * sm90::kSwizzleRow;
  const uint32_t staging = weight_ring + p.stages * kBlocks * kN * sm90::kSwizzleRow;
  const uint32_t full = x_ring + p.barriers, empty = full + 8 * p.stages;
  const int warp = threadIdx.x / kWarpSize;
  if (threadIdx.x == kMultiplyWarps * kWarpSize) {
    pdl_launch_dependents();
    sm90::prefetch_tensor_map(&p.weight.whole);
    for (int i = 0; i < p.stages; ++i) {
      sm90::mbarrier_init(full + 8 * i, 1);
      sm90::mbarrier_init(empty + 8 * i, kCluster * kMultiplyWarps);
    }
    sm90::mbarrier_init_fence();
  }
  if constexpr (kCluster > 1) {
    sm90::cluster_barrier();
  } else {
    __syncthreads();
  }
  if (warp >= kMultiplyWarps) {
    if constexpr (kStaged<kTokens, kN>) sm90::shrink_registers<kCopyRegisters>();
    if (threadIdx.x == kMultiplyWarps * kWarpSize)
      produce<kTokens, kN, kBlocks, kCluster>(p, x_ring, weight_ring, full, empty);
    __syncwarp();
  } else {
    if constexpr (kStaged<kTokens, kN>) sm90::grow_registers<kMultiplyRegisters>();
    consume<T, kTokens, kN, kBlocks, kCluster, kSums>(p, x_ring, weight_ring, staging, full, empty);
  }
  // The other CTA copies to this one's shared memory, and arrives at its barriers, until its end.
  if constexpr (kCluster > 1) sm90::cluster_barrier();
#endif
}

// Two CTAs of one warpgroup fit an SM's registers, so that the next kernel's CTA can start to copy
// its weights while this one runs.
template <typename T, int kWarpgroups, int kN, int kBlocks, bool kSums>
__global__ void __launch_bounds__(kThreads<kWarpgroups * kTileTokens, kN>,
                                  kSums ? 1 : 3 - kWarpgroups)
    gemm_kernel(const __grid_constant__ Problem p) {
  gemm_cta<T, kWarpgroups, kN, kBlocks, 1, kSums>(p);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define MINIVLLM_PAIR __cluster_dims__(2, 1, 1)
#else
#define MINIVLLM_PAIR
#endif
template <typename T, int kWarpgroups, int kN, int kBlocks, bool kSums>
__global__ void MINIVLLM_PAIR __launch_bounds__(kThreads<kWarpgroups * kTileTokens, kN>,
                                                kSums ? 1 : 3 - kWarpgroups)
    gemm_pair_kernel(const __grid_constant__ Problem p) {
  gemm_cta<T, kWarpgroups, kN, kBlocks, 2, kSums>(p);
}
#undef MINIVLLM_PAIR

}  // namespace minivllm::cuda::gemm
