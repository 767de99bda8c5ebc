// out = x W^T for Hopper: the tokens are wgmma's 64-row operand and the weight's rows its columns.
//
// A CTA owns tiles of [64 * kWarpgroups tokens, kN columns]. K is cut into chunks by the shape of
// the weight alone; each is one chain of k16 steps into one float accumulator, and the chunks' sums
// are added in order, so the bits of an output depend neither on the tile nor on how many tokens
// there are. For few tokens the CTAs of a cluster take a chunk each and exchange sums (kSplit), or
// a chunk is a tile of its own and the next kernel adds the sums: more CTAs pull weights. For many
// one CTA walks all chunks of a tile (kSums), and parks in shared memory the sums that its
// registers cannot hold. One warp copies stages (k-blocks of 64 elements: token rows and weight
// rows) into a ring; one or two warpgroups multiply. Rows behind the last token are not copied: in
// the operand they are whatever is there in shared memory, and what comes of those rows is never
// stored. (A copy fills rows outside of the matrix with zeros, but much slower than it copies
// others.)
//
// Two CTAs of a cluster may work on neighbouring tiles in step: each copies half of the operand
// that they have in common, to both. That takes load from L2, which bounds products of 65 tokens
// on.
//
// Weights do not depend on the kernel before, so the ring is filled with them before pdl_wait.
#pragma once

#include "gemm_chunks.cuh"
#include "gemm_fused.cuh"
#include "gemm_leaders.cuh"
#include "gemm_staged.cuh"

namespace minivllm::cuda::gemm {

// The CTAs of a split give each other their chunks' sums: rank r gets those of warp r's 16 rows.
// Returns whether this warp then holds whole sums, in the place of its own.
template <typename S>
__device__ __forceinline__ bool exchange_sums(float (&acc)[S::kN / 2], uint32_t exchange,
                                              uint32_t barrier, bool any_rows, int warp, int lane) {
  constexpr int kVectors = S::kN / 8;  // of 4 floats, that a lane has
  constexpr int kVectorBytes = 16, kSourceBytes = kVectors * kWarpSize * kVectorBytes;
  const int rank = blockIdx.x % kSplitCtas;
  sm90::cluster_wait();  // the others' barriers stand
  if (!any_rows) return false;
  const uint32_t to = sm90::map_to_rank(exchange + rank * kSourceBytes + lane * kVectorBytes, warp);
  const uint32_t mapped_barrier = sm90::map_to_rank(barrier, warp);
#pragma unroll
  for (int i = 0; i < kVectors; ++i)
    sm90::store_remote(to + i * kWarpSize * kVectorBytes, acc + 4 * i, mapped_barrier);
  if (warp != rank) return false;
  sm90::mbarrier_wait(barrier, 0);
  const uint32_t from = exchange + lane * kVectorBytes;
#pragma unroll
  for (int source = 0; source < kSplitCtas; ++source) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float v[4];
      sm90::load_shared(v, from + source * kSourceBytes + i * kWarpSize * kVectorBytes);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        acc[4 * i + j] = source == 0 ? v[j] : __fadd_rn(acc[4 * i + j], v[j]);
    }
  }
  return true;
}

// The output as an instance for one task knows it: what other tasks would ask for folds away. That
// this one does not ask for it is task_of's to say.
template <Task kTask>
__device__ __forceinline__ decltype(auto) output_for(const Output& given) {
  if constexpr (kTask == Task::kAnything) {
    return (given);
  } else {
    constexpr bool kIsNormed = kTask == Task::kRopeKv || kTask == Task::kSiluMul;
    Output o = given;
    o.bias = nullptr;
    o.is_float = kTask == Task::kLeaveSums || kTask == Task::kLogits;
    o.epilogue = kTask == Task::kRopeKv    ? Epilogue::kRopeKv
                 : kTask == Task::kSiluMul ? Epilogue::kSiluMul
                 : kTask == Task::kWeigh   ? Epilogue::kResidual
                                           : Epilogue::kNone;
    if (kIsNormed) __builtin_assume(o.square_sums != nullptr);
    if (!kIsNormed && kTask != Task::kLogits) o.square_sums = nullptr;
    if (kTask == Task::kWeigh) __builtin_assume(o.weighted != nullptr);
    if (kTask != Task::kWeigh) o.weighted = nullptr;
    if (kTask == Task::kLogits) __builtin_assume(o.leaders.leaders != nullptr);
    return o;
  }
}

template <typename T, typename S>
__device__ __forceinline__ void consume(const Problem& p, uint32_t x_ring, uint32_t weight_ring,
                                        uint32_t staging, uint32_t full, uint32_t empty) {
  constexpr int kN = S::kN;
  decltype(auto) o = output_for<S::kTask>(p.output);
  // Shuffled either way: descriptors want it.
  constexpr int kWarps = sm90::kWarpgroupSize / kWarpSize;
  const int warpgroup = S::kWarpgroups == 1 ? 0
                        : S::kUniformWarps
                            ? sm90::warp_index() / kWarps
                            : __shfl_sync(kFullMask, threadIdx.x / sm90::kWarpgroupSize, 0);
  const int warp = S::kUniformWarps ? sm90::warp_index() % kWarps
                                    : threadIdx.x % sm90::kWarpgroupSize / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  Ring<S> ring(p, x_ring + warpgroup * kTileTokens * sm90::kSwizzleRow, weight_ring, full, empty,
               lane);
  Cursor<S> tiles(p);
  const bool rope = o.epilogue == Epilogue::kRopeKv;
  [[maybe_unused]] RopeRows rope_rows;
  const bool has_rope_rows = S::kSplit && rope && o.rope.settled;  // which has one tile
  if constexpr (S::kSplit) {
    if (has_rope_rows)
      rope_rows = RopeRows(o, Place{tiles.tile.token + warpgroup * kTileTokens, 0, warp, lane});
  }
  pdl_wait();  // out may be the kernel before's input, or its output

  const uint32_t buffers = staging + warpgroup * kExitBytes<S>;
  [[maybe_unused]] Exit exit{&p.out, buffers, warpgroup};
  [[maybe_unused]] uint32_t old[kN / 4];
  [[maybe_unused]] uint32_t weights[kGroupPairs];
  split_norm::RowSums square_sums[2];
  float scale[2];
  int scaled = -1;  // the token that these are of
  const bool residual = o.epilogue == Epilogue::kResidual;
  const bool leaders = S::kLeaders && o.leaders.leaders != nullptr;
  bool wanted = true;  // this tile's outputs, and not their leaders alone
  int looked_up = -1;  // the token that this is of
  float acc[kN / 2];
  for (; !tiles.done(p); tiles.next_tile(p)) {
    const Place at = {tiles.tile.token + warpgroup * kTileTokens, tiles.tile.column, warp, lane};
    // What the epilogue reads travels while the tile is multiplied, where there are registers.
    const auto load_ahead = [&] {
      if constexpr (!S::kStaged) {
        if (residual) load_pairs<T, kN>(old, o, at);
        if constexpr (S::kFuses) {
          if (o.weighted != nullptr) load_weights<T>(weights, o, at);
          if (rope && !has_rope_rows) rope_rows = RopeRows(o, at);
        }
      }
    };
    const bool is_last = !S::kSplit || blockIdx.x % kSplitCtas == warp;  // its sums will be whole
    const bool normed = o.square_sums != nullptr;
    if (leaders && at.token != looked_up) {
      wanted = wants_logits(o, at.token, lane);
      looked_up = at.token;
    }
    if (is_last) {
      if constexpr (S::kSquareSumsAhead) {
        if (normed && at.token != scaled) load_square_sums(square_sums, o, at);
      }
      if constexpr (S::kLoadsAhead) load_ahead();
      if (S::kSquareSumsAhead && normed && scaled < 0) {  // the tokens are not there yet
        find_scales(scale, square_sums, o, lane);
        scaled = at.token;
      }
    }
    if constexpr (S::kSums) {
      multiply_chunks<T>(acc, ring, p, exit);
    } else {
#pragma unroll
      for (int i = 0; i < kN / 2; ++i) acc[i] = 0.0f;
      for (int stage = 0; stage < p.tile_stages; ++stage) {
        ring.wait();
        ring.template multiply<T>(acc);
        if (stage > 0) {
          sm90::wgmma_wait<1>();
          ring.release_held();
        }
        ring.next(p);
      }
      sm90::wgmma_wait<0>();
      sm90::pin_registers(acc);
      ring.release_held();
    }
    if constexpr (S::kSplit) {
      const uint32_t barrier = full + 16 * p.stages;
      const bool any_rows = at.token + 16 * warp < o.num_tokens;
      if (!exchange_sums<S>(acc, x_ring + p.exchange, barrier, any_rows, warp, lane)) return;
    }
    if (normed) {
      if (at.token != scaled) {
        if constexpr (!S::kSquareSumsAhead) load_square_sums(square_sums, o, at);
        find_scales(scale, square_sums, o, lane);
        scaled = at.token;
      }
      scale_rows<kN>(acc, scale);
    }
    if constexpr (!S::kLoadsAhead) load_ahead();
    if (o.bias != nullptr) add_bias<T, kN>(acc, o, at);
    if constexpr (S::kLeaders) {
      if (leaders) store_leaders<kN>(acc, o, at);
      if (!wanted) continue;
    }
    if constexpr (S::kStaged) {
      if constexpr (!S::kSums) exit.matrix = tiles.tile.chunk;
      if (residual) {
        for (int owner = 0; owner < S::kWarpgroups; ++owner) {
          ring.wait();
          if (owner == warpgroup) {
            add_residual<T, kN>(acc, ring.weight_address(), at);
            sm90::async_proxy_fence();  // what comes into the slot next comes by the copy engine
          }
          __syncwarp();
          ring.release(ring.slot());
          ring.next(p);
        }
      }
      if constexpr (S::kWeighs) {
        store_staged_weighed<T, S>(acc, exit, p, at);
      } else {
        store_staged<T, S>(acc, exit, o, at);
      }
      continue;
    }
    if constexpr (S::kFuses) {
      if (rope) {
        store_rope<T>(acc, rope_rows, o, at);
        continue;
      }
      if (o.weighted != nullptr) {
        store_weighed<T>(acc, old, weights, o, at);
        continue;
      }
    }
    Output output = o;
    if (S::kTask == Task::kLeaveSums || (S::kTask == Task::kAnything && p.chunks > 1)) {
      // Each chunk's sums are a matrix of their own.
      const int64_t size = output.stride * output.num_tokens;
      output.out = static_cast<float*>(output.out) + tiles.tile.chunk * size;
    }
    store_pairs<T, kN>(acc, old, output, at);
  }
  if constexpr (S::kStaged) {  // shared memory must outlive the copies' reads
    if (threadIdx.x % sm90::kWarpgroupSize == 0) sm90::bulk_wait_read<0>();
  }
}

template <typename T, typename S>
__device__ __forceinline__ void gemm_cta(const Problem& p) {
#if defined(MINIVLLM_SM90A)
  extern __shared__ __align__(sm90::kSwizzleAtom) uint8_t shared[];
  constexpr int kMultiplyWarps = S::kWarpgroups * sm90::kWarpgroupSize / kWarpSize;
  // The tokens' ring comes first: the operand's rows behind it are then the weights'.
  const uint32_t x_ring = sm90::shared_address(shared);
  const uint32_t weight_ring = x_ring + p.stages * S::kBlocks * p.x.stage_rows * sm90::kSwizzleRow;
  const uint32_t staging = weight_ring + p.stages * S::kBlocks * S::kN * sm90::kSwizzleRow;
  const uint32_t full = x_ring + p.barriers, empty = full + 8 * p.stages;
  const int warp = S::kUniformWarps ? sm90::warp_index() : threadIdx.x / kWarpSize;
  if (threadIdx.x == kMultiplyWarps * kWarpSize) {
    pdl_launch_dependents();
    sm90::prefetch_tensor_map(&p.weight.whole);
    for (int i = 0; i < p.stages; ++i) {
      sm90::mbarrier_init(full + 8 * i, 1);
      sm90::mbarrier_init(empty + 8 * i, S::kShare * kMultiplyWarps);
    }
    if constexpr (S::kSplit) sm90::mbarrier_init(empty + 8 * p.stages, 1);
    sm90::mbarrier_init_fence();
    if constexpr (S::kSplit) sm90::mbarrier_expect(empty + 8 * p.stages, S::kExchangeBytes);
  }
  if constexpr (S::kShare > 1) {
    sm90::cluster_barrier();  // the other's barriers stand
  } else {
    __syncthreads();
    if constexpr (S::kSplit) sm90::cluster_arrive();  // and wait where sums go to others
  }
  if (warp >= kMultiplyWarps) {
    if constexpr (S::kStaged) sm90::shrink_registers<kCopyRegisters>();
    if (threadIdx.x == kMultiplyWarps * kWarpSize) produce<S>(p, x_ring, weight_ring, full, empty);
    __syncwarp();
  } else {
    if constexpr (S::kStaged) sm90::grow_registers<kMultiplyRegisters>();
    consume<T, S>(p, x_ring, weight_ring, staging, full, empty);
  }
#endif
}

template <typename T, typename S>
__global__ void __launch_bounds__(S::kThreads, S::kCtasAnSm)
    gemm_kernel(const __grid_constant__ Problem p) {
  gemm_cta<T, S>(p);
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define MINIVLLM_CLUSTER __cluster_dims__(S::kCtas, 1, 1)
#else
#define MINIVLLM_CLUSTER
#endif
template <typename T, typename S>
__global__ void MINIVLLM_CLUSTER __launch_bounds__(S::kThreads, S::kCtasAnSm)
    gemm_cluster_kernel(const __grid_constant__ Problem p) {
  gemm_cta<T, S>(p);
}
#undef MINIVLLM_CLUSTER

}  // namespace minivllm::cuda::gemm
