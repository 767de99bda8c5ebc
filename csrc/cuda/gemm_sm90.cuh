// out = x W^T for Hopper: the tokens are wgmma's 64-row operand and the weight's rows its columns.
//
// A CTA owns tiles of [64 * kWarpgroups tokens, kN columns]. K is cut into chunks by the shape of
// the weight alone; each is one chain of k16 steps into one float accumulator, and the chunks' sums
// are added in order, so the bits of an output depend neither on the tile nor on how many tokens
// there are. For few tokens a chunk is a tile of its own, more CTAs pull weights, and the next
// kernel adds the sums; for many one CTA walks all chunks of a tile (kSums). One warp copies stages
// (k-blocks of 64 elements: token rows and weight rows) into a ring; one or two warpgroups
// multiply. For at most 32 tokens only as many rows as needed are copied: the rows of the operand
// behind them are whatever follows in shared memory, and what comes of those rows is never stored.
//
// Two CTAs of a cluster may work on neighbouring tiles in step: each copies half of the operand
// that they have in common, to both. That takes load from L2, which bounds products of 65 tokens
// on.
//
// Weights do not depend on the kernel before, so the ring is filled with them before pdl_wait.
#pragma once

#include "gemm.cuh"
#include "gemm_epilogue.cuh"
#include "gemm_staged.cuh"
#include "sm90.cuh"

namespace minivllm::cuda::gemm {

constexpr int kTileTokens = 64;  // of a warpgroup
constexpr int kBlock = 64;       // elements of K in a k-block: one swizzled row of 128 bytes
constexpr int kSteps = 4;        // k16 steps in a k-block
constexpr int kMaxStages = 32;
constexpr int kRowUnits = sm90::kSwizzleRow / 16;  // a row in the units of a descriptor

// Tiles whose output leaves through shared memory.
template <int kTokens, int kN>
constexpr bool kStaged = kTokens > kTileTokens&& kN >= 128;

// Staged tiles need more registers than an even share: the copying warp gets a warpgroup's worth of
// threads and gives their registers away.
template <int kTokens, int kN>
constexpr int kThreads = kTokens / kTileTokens * sm90::kWarpgroupSize +
                         (kStaged<kTokens, kN> ? sm90::kWarpgroupSize : kWarpSize);
constexpr int kCopyRegisters = 40;
constexpr int kMultiplyRegisters = 232;

struct Problem {
  CUtensorMap x, weight;  // boxes of one stage; of half a stage for what is shared
  CUtensorMap out;        // of staged tiles
  Output output;
  int stages;        // of the ring
  int tile_stages;   // stages that a tile takes
  int chunk_stages;  // stages of a chunk of K; kSums adds up after each
  int chunks;        // chunks that are tiles of their own, side by side; else 1
  int stage_tokens;  // token rows in a stage, a multiple of 8
  // Tiles, or pairs of tiles where two CTAs share tokens (a pair of columns) or weights (of
  // tokens).
  int token_units, column_units;
  int group;           // token units that are walked before the next column unit
  int barriers;        // offset of the barriers in shared memory
  bool stream_weight;  // each weight is read once: it need not stay in L2
  Sharing sharing;
};

struct Tile {
  int token, column;  // first of each
  int chunk;          // of K, where chunks are tiles
};

// The walk over the tiles of a CTA, in an order that keeps the weights and tokens of neighbouring
// CTAs in L2.
template <int kTokens, int kN, int kCluster>
struct Cursor {
  int unit = blockIdx.x / kCluster;
  int stage = 0;  // inside the tile
  Tile tile;

  __device__ explicit Cursor(const Problem& p) { find_tile(p); }
  __device__ bool done(const Problem& p) const {
    return unit >= p.token_units * p.column_units * p.chunks;
  }
  __device__ void next_tile(const Problem& p) {
    stage = 0;
    unit += gridDim.x / kCluster;
    if (!done(p)) find_tile(p);
  }
  __device__ void next_stage(const Problem& p) {
    if (++stage == p.tile_stages) next_tile(p);
  }

 private:
  __device__ void find_tile(const Problem& p) {
    int chunk = 0, flat = unit;
    if (p.chunks > 1) {
      chunk = unit % p.chunks;
      flat = unit / p.chunks;
    }
    int token = 0, column = flat;
    if (p.token_units > 1) {
      const int group_units = p.group * p.column_units;
      const int group = flat / group_units, rest = flat % group_units;
      const int height = min(p.group, p.token_units - group * p.group);
      token = group * p.group + rest % height;
      column = rest / height;
    }
    if constexpr (kCluster > 1) {
      const int rank = blockIdx.x % kCluster;
      if (p.sharing == Sharing::kTokens) {
        column = column * kCluster + rank;
      } else {
        token = token * kCluster + rank;
      }
    }
    tile = {token * kTokens, column * kN, chunk};
  }
};

// Copies one operand's part of a stage; half of it to both CTAs where they share it: half of the
// k-blocks, or half of the rows where there is one k-block.
template <int kBlocks, int kCluster>
__device__ __forceinline__ void load_stage(uint32_t destination, const CUtensorMap* map,
                                           uint32_t barrier, int row, int block, int rows,
                                           bool shared, uint64_t policy) {
  if constexpr (kCluster > 1) {
    if (shared) {
      static_assert(kBlocks == 1 || kBlocks % kCluster == 0);
      const int rank = blockIdx.x % kCluster;
      destination += rank * (rows * kBlocks / kCluster * sm90::kSwizzleRow);
      if constexpr (kBlocks == 1) {
        row += rank * (rows / kCluster);
      } else {
        block += rank * (kBlocks / kCluster);
      }
    }
  }
  if (kCluster > 1 && shared) {
    constexpr uint16_t kAllRanks = (1 << kCluster) - 1;
    sm90::tma_load_multicast(destination, map, barrier, 0, row, block, kAllRanks, policy);
  } else {
    sm90::tma_load(destination, map, barrier, 0, row, block, policy);
  }
}

template <int kTokens, int kN, int kBlocks, int kCluster>
__device__ __forceinline__ void produce(const Problem& p, uint32_t x_ring, uint32_t weight_ring,
                                        uint32_t full, uint32_t empty) {
  const int x_bytes = p.stage_tokens * kBlocks * sm90::kSwizzleRow;
  const int weight_bytes = kN * kBlocks * sm90::kSwizzleRow;
  const uint64_t x_policy =
      p.stream_weight ? sm90::evict_last_policy() : sm90::evict_normal_policy();
  const uint64_t weight_policy =
      p.stream_weight ? sm90::evict_first_policy() : sm90::evict_normal_policy();
  Cursor<kTokens, kN, kCluster> weight_at(p), x_at(p);
  const auto block_of = [&](const auto& at) {
    return (at.tile.chunk * p.tile_stages + at.stage) * kBlocks;
  };
  const auto load_weight = [&](int slot) {
    sm90::mbarrier_expect(full + 8 * slot, x_bytes + weight_bytes);
    load_stage<kBlocks, kCluster>(weight_ring + slot * weight_bytes, &p.weight, full + 8 * slot,
                                  weight_at.tile.column, block_of(weight_at), kN,
                                  p.sharing == Sharing::kWeights, weight_policy);
    weight_at.next_stage(p);
  };
  const auto load_x = [&](int slot) {
    load_stage<kBlocks, kCluster>(x_ring + slot * x_bytes, &p.x, full + 8 * slot, x_at.tile.token,
                                  block_of(x_at), p.stage_tokens, p.sharing == Sharing::kTokens,
                                  x_policy);
    x_at.next_stage(p);
  };
  for (int slot = 0; slot < p.stages && !weight_at.done(p); ++slot) load_weight(slot);
  sm90::prefetch_tensor_map(&p.x);
  pdl_wait();
  for (int slot = 0; slot < p.stages && !x_at.done(p); ++slot) load_x(slot);
  int slot = 0;
  uint32_t parity = 0;
  while (!weight_at.done(p)) {
    sm90::mbarrier_wait(empty + 8 * slot, parity);
    load_weight(slot);
    load_x(slot);
    if (++slot == p.stages) slot = 0, parity ^= 1;
  }
}

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
  const uint32_t x_block = p.stage_tokens * kRowUnits;
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
  const uint32_t weight_ring = x_ring + p.stages * kBlocks * p.stage_tokens * sm90::kSwizzleRow;
  const uint32_t staging = weight_ring + p.stages * kBlocks * kN * sm90::kSwizzleRow;
  const uint32_t full = x_ring + p.barriers, empty = full + 8 * p.stages;
  const int warp = threadIdx.x / kWarpSize;
  if (threadIdx.x == kMultiplyWarps * kWarpSize) {
    pdl_launch_dependents();
    sm90::prefetch_tensor_map(&p.weight);
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
__global__ void __launch_bounds__(kThreads<kWarpgroups * kTileTokens, kN>, 3 - kWarpgroups)
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
                                                3 - kWarpgroups)
    gemm_pair_kernel(const __grid_constant__ Problem p) {
  gemm_cta<T, kWarpgroups, kN, kBlocks, 2, kSums>(p);
}
#undef MINIVLLM_PAIR

}  // namespace minivllm::cuda::gemm
