// The copying warp of the matrix product for Hopper: which tiles a CTA owns, and how their operands
// come into the ring. See gemm_sm90.cuh.
#pragma once

#include "gemm.cuh"
#include "gemm_epilogue.cuh"
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

// A matrix whose rows are copied a stage at a time.
struct Operand {
  CUtensorMap whole;  // boxes of one stage; of half a stage for what is shared
  CUtensorMap
      last;        // boxes of one k-block (half of it) of the last tile, where that has fewer rows
  int stage_rows;  // a multiple of 8
  int last_rows;   // of the last tile
  int end;         // of all rows, rounded up to what can be copied

  // How many of a tile's rows there are; none or less for a tile outside.
  __device__ int rows_from(int first) const { return min(stage_rows, end - first); }
};

struct Problem {
  Operand x, weight;
  CUtensorMap out;  // of staged tiles
  Output output;
  int stages;        // of the ring
  int tile_stages;   // stages that a tile takes
  int chunk_stages;  // stages of a chunk of K; kSums adds up after each
  int chunks;        // chunks that are tiles of their own, side by side; else 1
  // Tiles, or pairs of tiles where two CTAs share tokens (a pair of columns) or weights (of
  // tokens).
  int token_units, column_units;
  int units;          // of all chunks
  int group;          // token units that are walked before the next column unit
  int barriers;       // offset of the barriers in shared memory
  const void* ahead;  // weights of a product to come, asked into L2 while memory has little to do
  int64_t ahead_bytes;
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
  __device__ bool done(const Problem& p) const { return unit >= p.units; }
  __device__ void next_tile(const Problem& p) {
    stage = 0;
    unit += gridDim.x / kCluster;
    if (!done(p)) find_tile(p);
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

// How one operand's part of a tile's stages is copied: half of it by each CTA where they share it,
// half of the k-blocks, or half of the rows where there is one k-block. Worked out once a tile: the
// copying thread has few clocks for a stage, and few registers.
template <int kBlocks, int kCluster>
struct Source {
  static_assert(kBlocks == 1 || kBlocks % kCluster == 0);
  int row;
  int copies;  // that make up a stage: 1, or one for each k-block of the last rows; 0 outside
  bool whole;

  // Returns the bytes of a stage, both halves.
  __device__ int find(const Operand& operand, int first, bool shared) {
    const int rows = max(0, operand.rows_from(first));
    whole = rows == operand.stage_rows;
    copies = rows == 0 ? 0 : whole ? 1 : kBlocks / (kBlocks > 1 && shared ? kCluster : 1);
    row = first;
    return rows * kBlocks * sm90::kSwizzleRow;
  }

  __device__ void load(const Operand& operand, uint32_t to, uint32_t barrier, int block,
                       bool shared, uint64_t policy) const {
    const CUtensorMap* map = whole ? &operand.whole : &operand.last;
    const int block_bytes = operand.stage_rows * sm90::kSwizzleRow;
    int first = row;
    if (kCluster > 1 && shared) {
      const int rank = blockIdx.x % kCluster;
      if constexpr (kBlocks == 1) {
        const int half = (whole ? operand.stage_rows : operand.last_rows) / kCluster;
        first += rank * half;
        to += rank * half * sm90::kSwizzleRow;
      } else {
        block += rank * (kBlocks / kCluster);
        to += rank * (kBlocks / kCluster) * block_bytes;
      }
    }
#pragma unroll 1
    for (int i = 0; i < copies; ++i, to += block_bytes, ++block) {
      if (kCluster > 1 && shared) {
        constexpr uint16_t kAllRanks = (1 << kCluster) - 1;
        sm90::tma_load_multicast(to, map, barrier, 0, first, block, kAllRanks, policy);
      } else {
        sm90::tma_load(to, map, barrier, 0, first, block, policy);
      }
    }
  }
};

// A cursor and where its tile's operands come from.
template <int kTokens, int kN, int kBlocks, int kCluster>
struct Walk {
  Cursor<kTokens, kN, kCluster> at;
  Source<kBlocks, kCluster> x, weight;
  int block;  // of K, where the stage begins
  int bytes;  // of the stage

  __device__ explicit Walk(const Problem& p) : at(p) { find(p); }
  __device__ void next_stage(const Problem& p) {
    block += kBlocks;
    if (++at.stage < p.tile_stages) return;
    at.next_tile(p);
    if (!at.done(p)) find(p);
  }
  __device__ void load_weight(const Problem& p, uint32_t to, uint32_t barrier, uint64_t policy) {
    weight.load(p.weight, to, barrier, block, p.sharing == Sharing::kWeights, policy);
  }
  __device__ void load_x(const Problem& p, uint32_t to, uint32_t barrier, uint64_t policy) {
    x.load(p.x, to, barrier, block, p.sharing == Sharing::kTokens, policy);
  }

 private:
  __device__ void find(const Problem& p) {
    block = at.tile.chunk * p.tile_stages * kBlocks;
    bytes = x.find(p.x, at.tile.token, p.sharing == Sharing::kTokens);
    bytes += weight.find(p.weight, at.tile.column, p.sharing == Sharing::kWeights);
  }
};

template <int kTokens, int kN, int kBlocks, int kCluster>
__device__ __forceinline__ void produce(const Problem& p, uint32_t x_ring, uint32_t weight_ring,
                                        uint32_t full, uint32_t empty) {
  const int x_bytes = p.x.stage_rows * kBlocks * sm90::kSwizzleRow;
  constexpr int kWeightBytes = kN * kBlocks * sm90::kSwizzleRow;
  const uint64_t x_policy =
      p.stream_weight ? sm90::evict_last_policy() : sm90::evict_normal_policy();
  const uint64_t weight_policy =
      p.stream_weight ? sm90::evict_first_policy() : sm90::evict_normal_policy();
  Walk<kTokens, kN, kBlocks, kCluster> walk(p), behind(p);
  const auto load_weight = [&](int slot) {
    sm90::mbarrier_expect(full + 8 * slot, walk.bytes);
    walk.load_weight(p, weight_ring + slot * kWeightBytes, full + 8 * slot, weight_policy);
  };
  for (int slot = 0; slot < p.stages && !walk.at.done(p); ++slot) {
    load_weight(slot);
    walk.next_stage(p);
  }
  sm90::prefetch_tensor_map(&p.x.whole);
  sm90::prefetch_share(p.ahead, p.ahead_bytes);
  pdl_wait();
  for (int slot = 0; slot < p.stages && !behind.at.done(p); ++slot) {
    behind.load_x(p, x_ring + slot * x_bytes, full + 8 * slot, x_policy);
    behind.next_stage(p);
  }
  int slot = 0;
  uint32_t parity = 0;
  while (!walk.at.done(p)) {
    sm90::mbarrier_wait(empty + 8 * slot, parity);
    load_weight(slot);
    walk.load_x(p, x_ring + slot * x_bytes, full + 8 * slot, x_policy);
    walk.next_stage(p);
    if (++slot == p.stages) slot = 0, parity ^= 1;
  }
}

}  // namespace minivllm::cuda::gemm
