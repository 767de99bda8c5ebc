// out = x W^T for Hopper: the tokens are wgmma's 64-row operand and the weight's rows its columns.
//
// A CTA owns tiles of [64 * kWarpgroups tokens, kN columns] and walks the whole of K for each: one
// chain of k16 steps into one float accumulator, so the bits of an output depend neither on the
// tile nor on how many tokens there are. One warp copies stages (k-blocks of 64 elements: token
// rows and weight rows) into a ring; one or two warpgroups multiply. For at most 32 tokens only as
// many rows as needed are copied: the rows of the operand behind them are whatever follows in
// shared memory, and what comes of those rows is never stored.
//
// Weights do not depend on the kernel before, so the ring is filled with them before pdl_wait.
#pragma once

#include <algorithm>

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
  CUtensorMap x, weight;  // boxes of one stage
  CUtensorMap out;        // of staged tiles
  Output output;
  int stages;           // of the ring
  int tile_stages;      // stages that a tile takes: k / (kBlock * kBlocks)
  int prefetch_stages;  // of weights, brought to L2 beyond the ring
  int stage_tokens;     // token rows in a stage, a multiple of 8
  int token_tiles, column_tiles;
  int group;           // token tiles that are walked before the next column tile
  bool stream_weight;  // each weight is read once: it need not stay in L2
};

struct Tile {
  int token, column;  // tile indices
};

// Tiles in an order that keeps the weights and tokens of neighbouring CTAs in L2.
__device__ __forceinline__ Tile tile_at(const Problem& p, int index) {
  if (p.token_tiles == 1) return {0, index};
  const int group_tiles = p.group * p.column_tiles;
  const int group = index / group_tiles, rest = index % group_tiles;
  const int height = min(p.group, p.token_tiles - group * p.group);
  return {group * p.group + rest % height, rest / height};
}

// A stage of the walk over all tiles of a CTA.
struct Cursor {
  int index, stage;  // tile, stage inside the tile
  Tile tile;

  __device__ explicit Cursor(const Problem& p)
      : index(blockIdx.x), stage(0), tile(tile_at(p, blockIdx.x)) {}
  __device__ void advance(const Problem& p) {
    if (++stage < p.tile_stages) return;
    stage = 0;
    index += gridDim.x;
    if (index < p.token_tiles * p.column_tiles) tile = tile_at(p, index);
  }
};

template <int kTokens, int kN, int kBlocks>
__device__ __forceinline__ void produce(const Problem& p, uint32_t x_ring, uint32_t weight_ring,
                                        uint32_t full, uint32_t empty) {
  const int x_bytes = p.stage_tokens * kBlocks * sm90::kSwizzleRow;
  const int weight_bytes = kN * kBlocks * sm90::kSwizzleRow;
  const uint64_t x_policy =
      p.token_tiles == 1 ? sm90::evict_last_policy() : sm90::evict_normal_policy();
  const uint64_t weight_policy =
      p.stream_weight ? sm90::evict_first_policy() : sm90::evict_normal_policy();
  const int tiles = p.token_tiles * p.column_tiles;
  const int total = (tiles - blockIdx.x + gridDim.x - 1) / gridDim.x * p.tile_stages;
  Cursor weight_at(p), x_at(p);
  const auto load_weight = [&](int slot) {
    sm90::mbarrier_expect(full + 8 * slot, x_bytes + weight_bytes);
    sm90::tma_load(weight_ring + slot * weight_bytes, &p.weight, full + 8 * slot, 0,
                   weight_at.tile.column * kN, weight_at.stage * kBlocks, weight_policy);
    weight_at.advance(p);
  };
  const auto load_x = [&](int slot) {
    sm90::tma_load(x_ring + slot * x_bytes, &p.x, full + 8 * slot, 0, x_at.tile.token * kTokens,
                   x_at.stage * kBlocks, x_policy);
    x_at.advance(p);
  };
  const int ahead = min(p.stages, total);
  for (int slot = 0; slot < ahead; ++slot) load_weight(slot);
  Cursor later = weight_at;
  for (int i = ahead; i < min(ahead + p.prefetch_stages, total); ++i) {
    sm90::tma_prefetch(&p.weight, 0, later.tile.column * kN, later.stage * kBlocks, weight_policy);
    later.advance(p);
  }
  sm90::prefetch_tensor_map(&p.x);
  pdl_wait();
  for (int slot = 0; slot < ahead; ++slot) load_x(slot);
  int slot = 0;
  uint32_t parity = 0;
  for (int i = ahead; i < total; ++i) {
    sm90::mbarrier_wait(empty + 8 * slot, parity);
    load_weight(slot);
    load_x(slot);
    if (++slot == p.stages) slot = 0, parity ^= 1;
  }
}

template <typename T, int kTokens, int kN, int kBlocks>
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
  const int tiles = p.token_tiles * p.column_tiles;
  pdl_wait();  // out may be the kernel before's input, or its output

  constexpr bool kIsStaged = kStaged<kTokens, kN>;
  [[maybe_unused]] Exit exit{&p.out, staging + warpgroup * kChunkBuffers * kChunkBytes, warpgroup};
  [[maybe_unused]] Ahead ahead;
  [[maybe_unused]] uint32_t old[kN / 4];
  const bool residual = p.output.epilogue == Epilogue::kResidual;
  float acc[kN / 2];
  int slot = 0, held = 0;
  uint32_t parity = 0, x_slot = x_first, weight_slot = weight_first;
  for (int index = blockIdx.x; index < tiles; index += gridDim.x) {
    const Tile tile = tile_at(p, index);
    const Place at = {tile.token * kTokens + warpgroup * kTileTokens, tile.column * kN, warp, lane};
    if (residual) {  // travels while the tile is multiplied
      if constexpr (kIsStaged) {
        load_chunk<T>(ahead.old[0], p.output, at, 0);
        load_chunk<T>(ahead.old[1], p.output, at, 1);
      } else {
        load_pairs<T, kN>(old, p.output, at);
      }
    }
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) acc[i] = 0.0f;
    for (int stage = 0; stage < p.tile_stages; ++stage) {
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
        if (lane == 0) sm90::mbarrier_arrive(empty + 8 * held);
      }
      held = slot;
      if (++slot == p.stages) slot = 0, parity ^= 1, x_slot = x_first, weight_slot = weight_first;
    }
    sm90::wgmma_wait<0>();
    sm90::pin_registers(acc);
    if (lane == 0) sm90::mbarrier_arrive(empty + 8 * held);
    if (p.output.bias != nullptr) add_bias<T, kN>(acc, p.output, at);
    if constexpr (kIsStaged) {
      store_staged<T, kN>(acc, ahead, exit, p.output, at);
    } else {
      store_pairs<T, kN>(acc, old, p.output, at);
    }
  }
  if constexpr (kIsStaged) {  // shared memory must outlive the copies' reads
    if (threadIdx.x % sm90::kWarpgroupSize == 0) sm90::bulk_wait_read<0>();
  }
}

// Two CTAs of one warpgroup fit an SM's registers, so that the next kernel's CTA can start to copy
// its weights while this one runs.
template <typename T, int kWarpgroups, int kN, int kBlocks>
__global__ void __launch_bounds__(kThreads<kWarpgroups * kTileTokens, kN>, 3 - kWarpgroups)
    gemm_kernel(const __grid_constant__ Problem p) {
#if defined(MINIVLLM_SM90A)
  extern __shared__ uint8_t shared[];
  __shared__ uint64_t barriers[2 * kMaxStages];
  constexpr int kTokens = kWarpgroups * kTileTokens;
  const uint32_t full = sm90::shared_address(barriers), empty = full + 8 * kMaxStages;
  // The tokens' ring comes first: the operand's rows behind it are then the weights'.
  const uint32_t x_ring = (sm90::shared_address(shared) + sm90::kSwizzleAtom - 1) /
                          sm90::kSwizzleAtom * sm90::kSwizzleAtom;
  const uint32_t weight_ring = x_ring + p.stages * kBlocks * p.stage_tokens * sm90::kSwizzleRow;
  const uint32_t staging = weight_ring + p.stages * kBlocks * kN * sm90::kSwizzleRow;
  const int warp = threadIdx.x / kWarpSize;
  constexpr int kProducer = kWarpgroups * sm90::kWarpgroupSize / kWarpSize;
  if (warp == kProducer) {
    pdl_launch_dependents();
    if (threadIdx.x % kWarpSize == 0) {
      sm90::prefetch_tensor_map(&p.weight);
      for (int i = 0; i < p.stages; ++i) {
        sm90::mbarrier_init(full + 8 * i, 1);
        sm90::mbarrier_init(empty + 8 * i, kProducer);  // one arrival a multiplying warp
      }
      sm90::mbarrier_init_fence();
    }
  }
  __syncthreads();
  if (warp >= kProducer) {
    if constexpr (kStaged<kTokens, kN>) sm90::shrink_registers<kCopyRegisters>();
    if (threadIdx.x == kProducer * kWarpSize)
      produce<kTokens, kN, kBlocks>(p, x_ring, weight_ring, full, empty);
  } else {
    if constexpr (kStaged<kTokens, kN>) sm90::grow_registers<kMultiplyRegisters>();
    consume<T, kTokens, kN, kBlocks>(p, x_ring, weight_ring, staging, full, empty);
  }
#endif
}

template <typename T, int kWarpgroups, int kN, int kBlocks>
void launch_instance(const LinearParams& p, const GemmConfig& config, Stream stream) {
  constexpr int kTokens = kWarpgroups * kTileTokens;
  const auto ceil_div = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
  Problem problem;
  problem.tile_stages = static_cast<int>(p.k / (kBlock * kBlocks));
  problem.prefetch_stages = config.prefetch_bytes / (kN * kBlocks * sm90::kSwizzleRow);
  problem.stage_tokens = kTokens;
  for (int rows = 8; rows < kTileTokens; rows *= 2)
    if (p.num_tokens <= rows) {
      problem.stage_tokens = rows;
      break;
    }
  const int stage_bytes = (problem.stage_tokens + kN) * kBlocks * sm90::kSwizzleRow;
  problem.stages = std::max(2, std::min({kMaxStages, config.ring_bytes / stage_bytes}));
  problem.token_tiles = ceil_div(p.num_tokens, kTokens);
  problem.column_tiles = ceil_div(p.n, kN);
  constexpr int kGroup = 8;
  problem.group = kGroup;
  problem.stream_weight = problem.token_tiles == 1;
  problem.x =
      sm90::k_block_map(p.x, p.dtype, p.num_tokens, p.k, p.x_stride, problem.stage_tokens, kBlocks);
  problem.weight = sm90::k_block_map(p.weight, p.dtype, p.n, p.k, p.k, kN, kBlocks);
  problem.output = {p.out,
                    p.bias,
                    p.out_stride,
                    static_cast<int>(p.num_tokens),
                    static_cast<int>(p.n),
                    p.epilogue,
                    p.out_dtype == DType::kFloat32};
  int staging_bytes = 0;
  if constexpr (kStaged<kTokens, kN>) {
    const bool silu = p.epilogue == Epilogue::kSiluMul;
    if (silu && kN % 128 != 0) throw std::invalid_argument("kSiluMul needs 128 or 256 columns");
    problem.out = sm90::matrix_map(p.out, p.out_dtype, p.num_tokens, silu ? p.n / 2 : p.n,
                                   p.out_stride, kChunkRows);
    staging_bytes = kWarpgroups * kChunkBuffers * kChunkBytes;
  }
  const int tiles = problem.token_tiles * problem.column_tiles;
  const int grid = std::min(tiles, num_sms() * config.ctas_per_sm);
  // The operand's rows behind few tokens are read too, also behind the last stage's tokens.
  const int behind = (kTileTokens - problem.stage_tokens) * sm90::kSwizzleRow;
  const int weight_ring = problem.stages * kBlocks * kN * sm90::kSwizzleRow;
  const int smem = sm90::kSwizzleAtom + problem.stages * stage_bytes + staging_bytes +
                   std::max(0, behind - weight_ring);
  MINIVLLM_LAUNCH(gemm_kernel<T, kWarpgroups, kN, kBlocks>, dim3(grid), dim3(kThreads<kTokens, kN>),
                  smem, stream, problem);
}

template <typename T, int kWarpgroups, int kN, int kBlocks>
struct Instance {
  static bool matches(const GemmConfig& config) {
    return config.warpgroups == kWarpgroups && config.columns == kN &&
           config.stage_blocks == kBlocks;
  }
  static void launch(const LinearParams& p, const GemmConfig& config, Stream stream) {
    launch_instance<T, kWarpgroups, kN, kBlocks>(p, config, stream);
  }
};

template <typename T>
void launch_gemm(const LinearParams& p, const GemmConfig& config, Stream stream) {
  const auto run = [&](auto... instances) {
    const bool found =
        ((instances.matches(config) && (instances.launch(p, config, stream), true)) || ...);
    if (!found) throw std::invalid_argument("no such instance of the matrix product");
  };
  run(Instance<T, 1, 16, 1>{}, Instance<T, 1, 16, 4>{}, Instance<T, 1, 16, 8>{},
      Instance<T, 1, 24, 1>{}, Instance<T, 1, 24, 4>{}, Instance<T, 1, 24, 8>{},
      Instance<T, 1, 32, 1>{}, Instance<T, 1, 32, 4>{}, Instance<T, 1, 32, 8>{},
      Instance<T, 1, 48, 1>{}, Instance<T, 1, 48, 4>{}, Instance<T, 1, 64, 1>{},
      Instance<T, 1, 64, 2>{}, Instance<T, 1, 64, 4>{}, Instance<T, 1, 96, 1>{},
      Instance<T, 1, 128, 1>{}, Instance<T, 2, 32, 1>{}, Instance<T, 2, 48, 1>{},
      Instance<T, 2, 64, 1>{}, Instance<T, 2, 96, 1>{}, Instance<T, 2, 128, 1>{},
      Instance<T, 2, 192, 1>{}, Instance<T, 2, 256, 1>{});
}

}  // namespace minivllm::cuda::gemm
