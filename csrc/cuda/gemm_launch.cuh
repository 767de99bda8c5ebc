// Launches the instance of the matrix product that a GemmConfig names. See gemm_sm90.cuh.
#pragma once

#include <algorithm>

#include "gemm_sm90.cuh"

namespace minivllm::cuda::gemm {

template <typename T, int kWarpgroups, int kN, int kBlocks, int kCluster, bool kSums>
void launch_instance(const LinearParams& p, const GemmConfig& config, Stream stream) {
  constexpr int kTokens = kWarpgroups * kTileTokens;
  const auto ceil_div = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
  Problem problem;
  problem.sharing = config.sharing;
  const int shared_tokens = config.sharing == Sharing::kTokens ? kCluster : 1;
  const int shared_weights = config.sharing == Sharing::kWeights ? kCluster : 1;
  const bool in_parts = p.partials != nullptr;
  problem.chunk_stages = static_cast<int>(p.k / p.num_chunks / (kBlock * kBlocks));
  problem.chunks = in_parts ? static_cast<int>(p.num_chunks) : 1;
  problem.tile_stages = problem.chunk_stages * static_cast<int>(in_parts ? 1 : p.num_chunks);
  problem.stage_tokens = kTokens;
  for (const int rows : {32, 16, 8})
    if (kWarpgroups == 1 && p.num_tokens <= rows) problem.stage_tokens = rows;
  const int stage_bytes = (problem.stage_tokens + kN) * kBlocks * sm90::kSwizzleRow;
  problem.stages = std::max(2, std::min({kMaxStages, config.ring_bytes / stage_bytes}));
  const int token_tiles = ceil_div(p.num_tokens, kTokens);
  problem.token_units = ceil_div(token_tiles, shared_weights);
  problem.column_units = ceil_div(ceil_div(p.n, kN), shared_tokens);
  constexpr int kGroupTokens = 2048;
  problem.group = kGroupTokens / kTokens / shared_weights;
  problem.stream_weight = token_tiles == 1;
  if (kBlocks == 1 && problem.stage_tokens / shared_tokens % 8 != 0)
    throw std::invalid_argument("too few tokens to share");
  // A shared operand is copied by halves: of the k-blocks, or of the rows of one k-block.
  const auto rows_of = [](int rows, int shares) { return kBlocks == 1 ? rows / shares : rows; };
  const auto blocks_of = [](int shares) { return kBlocks == 1 ? 1 : kBlocks / shares; };
  const auto map_of = [&](const void* matrix, int64_t rows, int64_t stride, int box_rows,
                          int shares) {
    return sm90::k_block_map(matrix, p.dtype, rows, p.k, stride, rows_of(box_rows, shares),
                             blocks_of(shares));
  };
  problem.x = map_of(p.x, p.num_tokens, p.x_stride, problem.stage_tokens, shared_tokens);
  problem.weight = map_of(p.weight, p.n, p.k, kN, shared_weights);
  problem.output = {in_parts ? p.partials : p.out,
                    in_parts ? nullptr : p.bias,
                    in_parts ? p.n : p.out_stride,
                    static_cast<int>(p.num_tokens),
                    static_cast<int>(p.n),
                    in_parts ? Epilogue::kNone : p.epilogue,
                    in_parts || p.out_dtype == DType::kFloat32};
  int staging_bytes = 0;
  if constexpr (kStaged<kTokens, kN>) {
    if (in_parts) throw std::invalid_argument("staged tiles leave no parts");
    const bool silu = p.epilogue == Epilogue::kSiluMul;
    if (silu && kN % 128 != 0) throw std::invalid_argument("kSiluMul needs 128 or 256 columns");
    problem.out = sm90::matrix_map(p.out, p.out_dtype, p.num_tokens, silu ? p.n / 2 : p.n,
                                   p.out_stride, kChunkRows);
    staging_bytes = kWarpgroups * kChunkBuffers * kChunkBytes;
  }
  const int clusters =
      std::min(problem.token_units * problem.column_units * problem.chunks, num_sms() / kCluster);
  // The operand's rows behind few tokens are read too, also behind the last stage's tokens.
  const int behind = (kTileTokens - problem.stage_tokens) * sm90::kSwizzleRow;
  const int weight_ring = problem.stages * kBlocks * kN * sm90::kSwizzleRow;
  problem.barriers =
      problem.stages * stage_bytes + staging_bytes + std::max(0, behind - weight_ring);
  const int smem = problem.barriers + 2 * problem.stages * static_cast<int>(sizeof(uint64_t));
  const auto kernel = [] {
    if constexpr (kCluster == 1) return gemm_kernel<T, kWarpgroups, kN, kBlocks, kSums>;
    if constexpr (kCluster == 2) return gemm_pair_kernel<T, kWarpgroups, kN, kBlocks, kSums>;
  }();
  MINIVLLM_LAUNCH(kernel, dim3(clusters * kCluster), dim3(kThreads<kTokens, kN>), smem, stream,
                  problem);
}

template <typename T, int kWarpgroups, int kN, int kBlocks, int kCluster, bool kSums = false>
struct Instance {
  static bool matches(const GemmConfig& config) {
    return config.sums == kSums && config.warpgroups == kWarpgroups && config.columns == kN &&
           config.stage_blocks == kBlocks && (config.sharing == Sharing::kNone ? 1 : 2) == kCluster;
  }
  static void launch(const LinearParams& p, const GemmConfig& config, Stream stream) {
    launch_instance<T, kWarpgroups, kN, kBlocks, kCluster, kSums>(p, config, stream);
  }
};

template <typename T>
void launch_gemm(const LinearParams& p, const GemmConfig& config, Stream stream) {
  const auto run = [&](auto... instances) {
    const bool found =
        ((instances.matches(config) && (instances.launch(p, config, stream), true)) || ...);
    if (!found) throw std::invalid_argument("no such instance of the matrix product");
  };
  run(Instance<T, 1, 16, 1, 1>{}, Instance<T, 1, 16, 4, 1>{}, Instance<T, 1, 16, 8, 1>{},
      Instance<T, 1, 24, 1, 1>{}, Instance<T, 1, 24, 4, 1>{}, Instance<T, 1, 24, 8, 1>{},
      Instance<T, 1, 32, 1, 1>{}, Instance<T, 1, 32, 4, 1>{}, Instance<T, 1, 32, 8, 1>{},
      Instance<T, 1, 48, 1, 1>{}, Instance<T, 1, 48, 4, 1>{}, Instance<T, 1, 64, 1, 1>{},
      Instance<T, 1, 64, 2, 1>{}, Instance<T, 1, 96, 1, 1>{}, Instance<T, 1, 128, 1, 1>{},
      Instance<T, 2, 128, 1, 1>{}, Instance<T, 2, 192, 1, 1>{}, Instance<T, 2, 256, 1, 1>{},
      Instance<T, 1, 32, 4, 2>{}, Instance<T, 1, 48, 4, 2>{}, Instance<T, 1, 64, 2, 2>{},
      Instance<T, 1, 96, 1, 2>{}, Instance<T, 1, 128, 1, 2>{}, Instance<T, 2, 32, 1, 2>{},
      Instance<T, 2, 64, 1, 2>{}, Instance<T, 2, 96, 1, 2>{}, Instance<T, 2, 128, 1, 2>{},
      Instance<T, 2, 192, 1, 2>{}, Instance<T, 2, 256, 1, 2>{}, Instance<T, 1, 64, 1, 1, true>{},
      Instance<T, 1, 64, 1, 2, true>{}, Instance<T, 1, 128, 1, 1, true>{},
      Instance<T, 1, 128, 1, 2, true>{}, Instance<T, 2, 128, 1, 1, true>{},
      Instance<T, 2, 192, 1, 1, true>{}, Instance<T, 2, 128, 1, 2, true>{},
      Instance<T, 2, 192, 1, 2, true>{});
}

}  // namespace minivllm::cuda::gemm
