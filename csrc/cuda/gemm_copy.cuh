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
// Of the output and the residual of staged tiles, 128 bytes wide: a warpgroup's part of it.
constexpr int kChunkRows = 64;
constexpr int kChunkBytes = kChunkRows * sm90::kSwizzleRow;

constexpr int kSplitCtas = 4;  // of a cluster where each takes a chunk of K

// An instance of the kernel.
template <int kWarpgroups_, int kN_, int kBlocks_, int kShare_, Chunks kChunks_, Task kTask_>
struct Shape {
  static constexpr int kWarpgroups = kWarpgroups_;
  static constexpr int kTokens = kWarpgroups * kTileTokens;
  static constexpr int kN = kN_;            // columns of a tile
  static constexpr int kBlocks = kBlocks_;  // k-blocks of a stage
  static constexpr int kShare = kShare_;    // CTAs that share an operand
  static constexpr bool kSums = kChunks_ == Chunks::kAdded;
  static constexpr bool kSplit = kChunks_ == Chunks::kSplit;
  static constexpr Task kTask = kTask_;
  // Those of one warpgroup that are compiled for one task are chosen for up to 64 tokens and whole
  // tiles of columns only.
  static constexpr bool kOneTokenTile =
      kTask != Task::kAnything && kTokens == kTileTokens && kShare == 1 && !kSums;
  static constexpr bool kMayHaveChunks = kTask == Task::kAnything || kTask == Task::kLeaveSums;
  static_assert(!kSplit || (kWarpgroups == 1 && kShare == 1));
  static constexpr int kCtas = kSplit ? kSplitCtas : kShare;  // of a cluster
  // Sums that the CTAs of a split put for each other: 16 rows of each one's chunk.
  static constexpr int kExchangeBytes =
      kSplit ? kSplitCtas * 16 * kN * static_cast<int>(sizeof(float)) : 0;
  // Tiles whose output leaves through shared memory. They need more registers than an even share:
  // the copying warp gets a warpgroup's worth of threads and gives their registers away.
  static constexpr bool kStaged = kTokens > kTileTokens&& kN >= 128;
  // A residual takes the place of a slot's weights: see load_residual.
  static_assert(!kStaged || kBlocks == 1);
  // Floats of a thread that add up chunks in registers; where there are none for the others, these
  // are parked in shared memory while a chunk is multiplied.
  static constexpr int kKept = !kSums ? 1 : kN == 256 ? 80 : kN / 2;
  static constexpr int kParked = kSums ? kN / 2 - kKept : 0;
  // Registers for what the epilogue reads are free while a tile is multiplied.
  static constexpr bool kLoadsAhead = !kSums;
  static constexpr bool kSquareSumsAhead = kLoadsAhead && (kStaged || kN <= 64);
  static constexpr int kThreads =
      kWarpgroups * sm90::kWarpgroupSize + (kStaged ? sm90::kWarpgroupSize : kWarpSize);
  // Tiles whose epilogue can do parts of a decoder layer: see gemm_fused.cuh. Of the staged ones
  // those that are compiled for it do the first half of a norm.
  static constexpr bool kFuses = kWarpgroups == 1 && kN == 64 && kShare == 1 && !kSums;
  static constexpr bool kWeighs = kFuses || (kStaged && kTask == Task::kWeigh);
  static constexpr bool kLeaders = (kTask == Task::kAnything || kTask == Task::kLogits) &&
                                   kN % kLeaderColumns == 0 && !kSums && !kSplit;  // see LeadersTo
  // Whether the multiplying warps know their index to be the same in a warp: see warp_index. Some
  // wide tiles have no registers for what the compiler makes of it.
  static constexpr bool kUniformWarps = !kSums && (!kStaged || kTask != Task::kAnything);
  // Two CTAs of one warpgroup fit an SM's registers, so that the next kernel's CTA can start to
  // copy its weights while this one runs.
  static constexpr int kCtasAnSm = kSums ? 1 : kSplit ? 2 : 3 - kWarpgroups;
};
constexpr int kCopyRegisters = 40;
constexpr int kMultiplyRegisters = 232;

// A matrix whose rows are copied a stage at a time.
struct Operand {
  CUtensorMap whole;  // boxes of one stage; of half a stage for what is shared
  CUtensorMap last;   // boxes of one k-block (half of it) of the last tile, if that has fewer rows
  int stage_rows;     // a multiple of 8
  int last_rows;      // of the last tile; 0 where that is a whole one
  int end;            // of all rows, rounded up to what can be copied
};

struct Problem {
  Operand x, weight;
  CUtensorMap out, weighted;  // of staged tiles, in boxes of a warpgroup's chunk
  Output output;
  int stages;        // of the ring
  int tile_stages;   // stages that a tile takes
  int chunk_stages;  // stages of a chunk of K; kSums adds up after each
  int chunks;        // chunks that are tiles of their own, side by side; else 1
  // Tiles, or pairs of tiles where two CTAs share tokens (a pair of columns) or weights (of
  // tokens).
  int token_units, column_units;
  int units;           // of all chunks
  int group;           // token units that are walked before the next column unit
  int barriers;        // offset of the barriers in shared memory
  int exchange;        // of where the CTAs of a split put sums for each other
  bool stream_weight;  // each weight is read once: it need not stay in L2
  Sharing sharing;
};

struct Tile {
  int token, column;  // first of each
  int chunk;          // of K, where chunks are tiles
};

// The walk over the tiles of a CTA, in an order that keeps the weights and tokens of neighbouring
// CTAs in L2.
template <typename S>
struct Cursor {
  int unit = blockIdx.x / S::kCtas;
  int stage = 0;  // inside the tile
  Tile tile;

  __device__ explicit Cursor(const Problem& p) { find_tile(p); }
  __device__ bool done(const Problem& p) const { return unit >= p.units; }
  __device__ void next_tile(const Problem& p) {
    stage = 0;
    unit += gridDim.x / S::kCtas;
    if (!done(p)) find_tile(p);
  }

 private:
  __device__ void find_tile(const Problem& p) {
    int chunk = 0, flat = unit;
    if constexpr (S::kSplit) {
      chunk = blockIdx.x % kSplitCtas;
    } else if (S::kMayHaveChunks && p.chunks > 1) {
      chunk = unit % p.chunks;
      flat = unit / p.chunks;
    }
    int token = 0, column = flat;
    if (!S::kOneTokenTile && p.token_units > 1) {
      const int group_units = p.group * p.column_units;
      const int group = flat / group_units, rest = flat % group_units;
      const int height = min(p.group, p.token_units - group * p.group);
      token = group * p.group + rest % height;
      column = rest / height;
    }
    if constexpr (S::kShare > 1) {
      const int rank = blockIdx.x % S::kShare;
      if (p.sharing == Sharing::kTokens) {
        column = column * S::kShare + rank;
      } else {
        token = token * S::kShare + rank;
      }
    }
    tile = {token * S::kTokens, column * S::kN, chunk};
  }
};

// How one operand's part of a tile's stages is copied: half of it by each CTA where they share it,
// half of the k-blocks, or half of the rows where there is one k-block. Worked out once a tile: the
// copying thread has few clocks for a stage, and few registers.
template <int kBlocks, int kShare, bool kAlwaysWhole>
struct Source {
  static_assert(kBlocks == 1 || kBlocks % kShare == 0);
  int row;     // first to copy
  int block;   // inside the stage, likewise
  int offset;  // of that in the stage's part of the ring
  int lasts;   // copies of last's boxes that make up a stage; 0: one of whole's; -1: none, outside

  // Returns the bytes of a stage, both halves.
  __device__ int find(const Operand& operand, int stage_rows, int first, bool shared) {
    // Not max(0, min(stage_rows, left)) == stage_rows: of that ptxas 13.0 makes a VIMNMX.RELU, and
    // of the comparison a predicate of it that is the same for left on the right: one is wrong.
    const int left = operand.end - first;
    const bool is_whole = kAlwaysWhole || left >= stage_rows;
    const int rows = is_whole ? stage_rows : left > 0 ? operand.last_rows : 0;
    row = first, block = 0, offset = 0;
    lasts = is_whole ? 0 : left > 0 ? kBlocks : -1;
    if (kShare > 1 && shared) {
      const int rank = blockIdx.x % kShare;
      if constexpr (kBlocks == 1) {
        const int half = rank * (rows / kShare);
        row += half;
        offset = half * sm90::kSwizzleRow;
      } else {
        block = rank * (kBlocks / kShare);
        offset = block * stage_rows * sm90::kSwizzleRow;
        if (lasts > 0) lasts = kBlocks / kShare;
      }
    }
    return rows * kBlocks * sm90::kSwizzleRow;
  }

  __device__ bool is_whole() const { return kAlwaysWhole || lasts == 0; }
  // One box, of whole's if that is how the tile is copied.
  __device__ void load_box(const CUtensorMap* map, uint32_t to, uint32_t barrier, int at,
                           bool shared, uint64_t policy) const {
    if (kShare > 1 && shared) {
      constexpr uint16_t kAllRanks = (1 << kShare) - 1;
      sm90::tma_load_multicast(to, map, barrier, 0, row, at, kAllRanks, policy);
    } else {
      sm90::tma_load(to, map, barrier, 0, row, at, policy);
    }
  }
  __device__ void load(const Operand& operand, int stage_rows, uint32_t to, uint32_t barrier,
                       int stage_block, bool shared, uint64_t policy) const {
    to += offset;
    int at = stage_block + block;
    if (is_whole()) return load_box(&operand.whole, to, barrier, at, shared, policy);
#pragma unroll 1
    for (int i = 0; i < lasts; ++i, ++at, to += stage_rows * sm90::kSwizzleRow)
      load_box(&operand.last, to, barrier, at, shared, policy);
  }
};

// A cursor and where its tile's operands come from.
template <typename S>
struct Walk {
  Cursor<S> at;
  Source<S::kBlocks, S::kShare, S::kOneTokenTile> x, weight;
  int block;  // of K, where the stage begins
  int bytes;  // of the stage

  __device__ explicit Walk(const Problem& p) : at(p) { find(p); }
  // Past the last stage of a tile with a residual it is for the caller to go on.
  __device__ void next_stage(const Problem& p, bool residual) {
    block += S::kBlocks;
    if (++at.stage == p.tile_stages && !residual) next_tile(p);
  }
  __device__ void next_tile(const Problem& p) {
    at.next_tile(p);
    if (!at.done(p)) find(p);
  }
  __device__ void load_weight(const Problem& p, uint32_t to, uint32_t barrier,
                              uint64_t policy) const {
    weight.load(p.weight, S::kN, to, barrier, block, p.sharing == Sharing::kWeights, policy);
  }
  __device__ void load_x(const Problem& p, uint32_t to, uint32_t barrier, uint64_t policy) const {
    x.load(p.x, p.x.stage_rows, to, barrier, block, p.sharing == Sharing::kTokens, policy);
  }

 private:
  __device__ void find(const Problem& p) {
    block = at.tile.chunk * p.tile_stages * S::kBlocks;
    bytes = x.find(p.x, p.x.stage_rows, at.tile.token, p.sharing == Sharing::kTokens) +
            weight.find(p.weight, S::kN, at.tile.column, p.sharing == Sharing::kWeights);
  }
};

// The residual of a staged tile follows its last stage through the ring: a slot for the rows of
// each warpgroup, in the weights' place, chunk by chunk.
template <typename S>
__device__ __forceinline__ void load_residual(const Problem& p, const Tile& tile, int warpgroup,
                                              uint32_t to, uint32_t barrier) {
  constexpr int kColumns = sm90::kSwizzleRow / 2;  // of a chunk
  const int token = tile.token + warpgroup * kTileTokens;
  const int columns = min(S::kN, p.output.n - tile.column);
  const int chunks = token < p.output.num_tokens ? (columns + kColumns - 1) / kColumns : 0;
  sm90::mbarrier_expect(barrier, max(chunks, 0) * kChunkBytes);
  const uint64_t policy = sm90::evict_first_policy();
#pragma unroll 1
  for (int i = 0; i < chunks; ++i)
    sm90::tma_load(to + i * kChunkBytes, &p.out, barrier, tile.column + i * kColumns, token, 0,
                   policy);
}

template <typename S>
__device__ __forceinline__ void produce(const Problem& p, uint32_t x_ring, uint32_t weight_ring,
                                        uint32_t full, uint32_t empty) {
  const int x_bytes = p.x.stage_rows * S::kBlocks * sm90::kSwizzleRow;
  constexpr int kWeightBytes = S::kN * S::kBlocks * sm90::kSwizzleRow;
  const uint64_t x_policy =
      p.stream_weight ? sm90::evict_last_policy() : sm90::evict_normal_policy();
  const uint64_t weight_policy =
      p.stream_weight ? sm90::evict_first_policy() : sm90::evict_normal_policy();
  Walk<S> walk(p);
  const auto load_weight = [&](int slot) {
    sm90::mbarrier_expect(full + 8 * slot, walk.bytes);
    walk.load_weight(p, weight_ring + slot * kWeightBytes, full + 8 * slot, weight_policy);
  };
  const bool residual = S::kStaged && p.output.epilogue == Epilogue::kResidual;
  const int ahead = residual ? min(p.stages, p.tile_stages) : p.stages;
  int filled = 0;
  for (; filled < ahead && !walk.at.done(p); ++filled) {
    load_weight(filled);
    walk.next_stage(p, residual);
  }
  sm90::prefetch_tensor_map(&p.x.whole);
  Walk<S> behind(p);  // the same stages' tokens
  pdl_wait();
  for (int slot = 0; slot < ahead && !behind.at.done(p); ++slot) {
    behind.load_x(p, x_ring + slot * x_bytes, full + 8 * slot, x_policy);
    behind.next_stage(p, residual);
  }
  int slot = filled == p.stages ? 0 : filled;
  uint32_t parity = filled == p.stages ? 0 : 1;  // of what was never filled, and has no wait
  const auto next_slot = [&] {
    if (++slot == p.stages) slot = 0, parity ^= 1;
  };
  while (!walk.at.done(p)) {  // what is left of a tile
    const int left = p.tile_stages - walk.at.stage;
    if (walk.x.is_whole() && walk.weight.is_whole()) {
      // The usual case, with little to do in each stage: the copying thread has few clocks.
      const bool share_x = p.sharing == Sharing::kTokens;
      const bool share_weight = p.sharing == Sharing::kWeights;
      const uint32_t x_first = x_ring + walk.x.offset;
      const uint32_t weight_first = weight_ring + walk.weight.offset;
      int x_block = walk.block + walk.x.block, weight_block = walk.block + walk.weight.block;
#pragma unroll 1
      for (int i = 0; i < left; ++i) {
        const uint32_t barrier = full + 8 * slot;
        sm90::mbarrier_wait(empty + 8 * slot, parity);
        sm90::mbarrier_expect(barrier, walk.bytes);
        walk.weight.load_box(&p.weight.whole, weight_first + slot * kWeightBytes, barrier,
                             weight_block, share_weight, weight_policy);
        walk.x.load_box(&p.x.whole, x_first + slot * x_bytes, barrier, x_block, share_x, x_policy);
        x_block += S::kBlocks;
        weight_block += S::kBlocks;
        next_slot();
      }
    } else {
#pragma unroll 1
      for (int i = 0; i < left; ++i) {
        sm90::mbarrier_wait(empty + 8 * slot, parity);
        load_weight(slot);
        walk.load_x(p, x_ring + slot * x_bytes, full + 8 * slot, x_policy);
        walk.block += S::kBlocks;
        next_slot();
      }
    }
    if constexpr (S::kStaged) {
      if (residual) {
#pragma unroll 1
        for (int i = 0; i < S::kWarpgroups; ++i) {
          sm90::mbarrier_wait(empty + 8 * slot, parity);
          load_residual<S>(p, walk.at.tile, i, weight_ring + slot * kWeightBytes, full + 8 * slot);
          next_slot();
        }
      }
    }
    walk.next_tile(p);
  }
  if constexpr (S::kShare > 1) {  // the other CTA arrives at this one's barriers until its end
    for (int i = 0; i < p.stages; ++i) {
      sm90::mbarrier_wait(empty + 8 * slot, parity);
      next_slot();
    }
  }
}

}  // namespace minivllm::cuda::gemm
