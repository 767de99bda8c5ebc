// Launches the instance of the matrix product that a GemmConfig names. See gemm_sm90.cuh.
#pragma once

#include <algorithm>
#include <type_traits>

#include "gemm_sm90.cuh"

namespace minivllm::cuda::gemm {

template <typename T, typename S>
void launch_instance(const LinearParams& p, const GemmConfig& config, Stream stream) {
  constexpr int kTokens = S::kTokens, kN = S::kN, kBlocks = S::kBlocks, kShare = S::kShare;
  const auto ceil_div = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
  Problem problem = {};
  problem.sharing = config.sharing;
  const int shared_tokens = config.sharing == Sharing::kTokens ? kShare : 1;
  const int shared_weights = config.sharing == Sharing::kWeights ? kShare : 1;
  const bool in_parts = p.partials != nullptr;
  problem.chunk_stages = static_cast<int>(p.k / p.num_chunks / (kBlock * kBlocks));
  problem.chunks = in_parts ? static_cast<int>(p.num_chunks) : 1;
  const bool one_chunk = in_parts || S::kSplit;
  problem.tile_stages = problem.chunk_stages * static_cast<int>(one_chunk ? 1 : p.num_chunks);
  // A shared operand is copied by halves: of the k-blocks, or of the rows of one k-block.
  const auto granule = [](int shares) {
    constexpr int kAtomRows = 8;
    return kBlocks == 1 ? kAtomRows * shares : kAtomRows;
  };
  const auto round_up = [&](int64_t rows, int to) { return ceil_div(rows, to) * to; };
  const auto operand_of = [&](const void* matrix, int64_t rows, int64_t stride, int stage_rows,
                              int shares) {
    Operand operand;
    operand.end = round_up(rows, granule(shares));
    operand.stage_rows = stage_rows;
    const auto map_of = [&](int box_rows, int blocks) {
      return sm90::k_block_map(matrix, p.dtype, rows, p.k, stride,
                               kBlocks == 1 ? box_rows / shares : box_rows, blocks);
    };
    operand.last_rows = operand.end % stage_rows;
    operand.whole = map_of(operand.stage_rows, kBlocks == 1 ? 1 : kBlocks / shares);
    operand.last = operand.last_rows == 0 ? operand.whole : map_of(operand.last_rows, 1);
    return operand;
  };
  const int stage_tokens =
      static_cast<int>(std::min<int64_t>(kTokens, round_up(p.num_tokens, granule(shared_tokens))));
  problem.x = operand_of(p.x, p.num_tokens, p.x_stride, stage_tokens, shared_tokens);
  problem.weight = operand_of(p.weight, p.n, p.k, kN, shared_weights);
  const int stage_bytes = (problem.x.stage_rows + kN) * kBlocks * sm90::kSwizzleRow;
  int staging_bytes = 0;
  if constexpr (S::kStaged) staging_bytes = S::kWarpgroups * kExitBytes<S>;
  // The ring shares a block's 227 KB with the way out and the barriers.
  constexpr int kSharedBytes = 227 * 1024;
  constexpr int kBarrierBytes = (2 * kMaxStages + 1) * static_cast<int>(sizeof(uint64_t));
  const int ring_bytes =
      std::min(config.ring_bytes, kSharedBytes - kBarrierBytes - staging_bytes - S::kExchangeBytes);
  problem.stages = std::max(2, std::min(kMaxStages, ring_bytes / stage_bytes));
  const int token_tiles = ceil_div(p.num_tokens, kTokens);
  problem.token_units = ceil_div(token_tiles, shared_weights);
  problem.column_units = ceil_div(ceil_div(p.n, kN), shared_tokens);
  problem.units = problem.token_units * problem.column_units * problem.chunks;
  constexpr int kGroupTokens = 2048;
  problem.group = kGroupTokens / kTokens / shared_weights;
  problem.stream_weight = token_tiles == 1;
  problem.output = {in_parts ? p.partials : p.out,
                    in_parts ? nullptr : p.bias,
                    in_parts ? p.n : p.out_stride,
                    static_cast<int>(p.num_tokens),
                    static_cast<int>(p.n),
                    in_parts ? Epilogue::kNone : p.epilogue,
                    in_parts || p.out_dtype == DType::kFloat32,
                    static_cast<int>(p.k / kNormColumns),
                    p.square_sums,
                    p.eps,
                    p.norm_weight,
                    p.weighted,
                    p.new_square_sums,
                    p.rope,
                    p.leaders};
  if (S::kTask != Task::kAnything && S::kTask != task_of(p, config))
    throw std::invalid_argument("this instance is for another task");
  if ((p.weighted != nullptr && !S::kWeighs) || (p.epilogue == Epilogue::kRopeKv && !S::kFuses))
    throw std::invalid_argument("this instance does no parts of a layer");
  if (p.leaders.leaders != nullptr && !S::kLeaders)
    throw std::invalid_argument("this instance finds no leaders");
  if constexpr (S::kStaged) {
    const bool silu = problem.output.epilogue == Epilogue::kSiluMul;
    if (silu && kN % 128 != 0) throw std::invalid_argument("kSiluMul needs 128 or 256 columns");
    const DType out_dtype = in_parts ? DType::kFloat32 : p.out_dtype;
    problem.out = sm90::matrices_map(problem.output.out, out_dtype, problem.chunks, p.num_tokens,
                                     silu ? p.n / 2 : p.n, problem.output.stride, kChunkRows);
    if (p.weighted != nullptr)
      problem.weighted =
          sm90::matrices_map(p.weighted, p.dtype, 1, p.num_tokens, p.n, p.n, kChunkRows);
  }
  // A split's CTAs have one tile; others walk.
  const int clusters = S::kSplit ? problem.units : std::min(problem.units, num_sms() / S::kCtas);
  // The operand's rows behind few tokens are read too, also behind the last stage's tokens.
  const int behind = (kTokens - problem.x.stage_rows) * sm90::kSwizzleRow;
  const int weight_ring = problem.stages * kBlocks * kN * sm90::kSwizzleRow;
  problem.exchange =
      problem.stages * stage_bytes + staging_bytes + std::max(0, behind - weight_ring);
  problem.barriers = problem.exchange + S::kExchangeBytes;
  const int barriers = 2 * problem.stages + (S::kSplit ? 1 : 0);
  const int smem = problem.barriers + barriers * static_cast<int>(sizeof(uint64_t));
  const auto kernel = [] {
    if constexpr (S::kCtas == 1) {
      return gemm_kernel<T, S>;
    } else {
      return gemm_cluster_kernel<T, S>;
    }
  }();
  MINIVLLM_LAUNCH(kernel, dim3(clusters * S::kCtas), dim3(S::kThreads), smem, stream, problem);
}

template <int kWarpgroups, int kN, int kBlocks, int kShare, Chunks kChunks = Chunks::kApart,
          Task kTask = Task::kAnything>
struct Instance {
  static bool matches(const GemmConfig& config) {
    return config.chunks == kChunks && config.task == kTask && config.warpgroups == kWarpgroups &&
           config.columns == kN && config.stage_blocks == kBlocks &&
           (config.sharing == Sharing::kNone ? 1 : 2) == kShare;
  }
  template <typename T>
  static void launch(const LinearParams& p, const GemmConfig& config, Stream stream) {
    launch_instance<T, Shape<kWarpgroups, kN, kBlocks, kShare, kChunks, kTask>>(p, config, stream);
  }
};

template <Task kTask, int kWarpgroups, int kN, int kBlocks, int kShare,
          Chunks kChunks = Chunks::kApart>
using ForTask = Instance<kWarpgroups, kN, kBlocks, kShare, kChunks, kTask>;

template <typename T, typename... Instances>
bool launch_one_of(const LinearParams& p, const GemmConfig& config, Stream stream) {
  return (
      (Instances::matches(config) && (Instances::template launch<T>(p, config, stream), true)) ||
      ...);
}

template <typename T>
void launch_gemm(const LinearParams& p, const GemmConfig& config, Stream stream) {
  // For the shapes that steps of Llama-3.2-1B have; a layer is fused in bfloat16 alone.
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    if (launch_one_of<T, ForTask<Task::kRopeKv, 1, 64, 2, 1, Chunks::kSplit>,
                      ForTask<Task::kWeigh, 1, 64, 2, 1, Chunks::kSplit>,
                      ForTask<Task::kSiluMul, 1, 64, 2, 1>, ForTask<Task::kSiluMul, 1, 128, 1, 1>,
                      ForTask<Task::kSiluMul, 2, 128, 1, 1>, ForTask<Task::kSiluMul, 2, 256, 1, 2>>(
            p, config, stream))
      return;
  }
  if (launch_one_of<T, ForTask<Task::kLeaveSums, 1, 64, 2, 1>,
                    ForTask<Task::kLeaveSums, 1, 96, 1, 1>, ForTask<Task::kLeaveSums, 2, 64, 1, 2>,
                    ForTask<Task::kLeaveSums, 2, 96, 1, 2>, ForTask<Task::kLeaveSums, 2, 128, 1, 1>,
                    ForTask<Task::kLeaveSums, 2, 128, 1, 2>,
                    ForTask<Task::kLeaveSums, 2, 192, 1, 2>, ForTask<Task::kLogits, 1, 64, 2, 1>,
                    ForTask<Task::kLogits, 1, 128, 1, 1>, ForTask<Task::kLogits, 2, 256, 1, 1>,
                    ForTask<Task::kLogits, 2, 256, 1, 2>,
                    ForTask<Task::kWeigh, 2, 256, 1, 2, Chunks::kAdded>>(p, config, stream))
    return;
  GemmConfig any = config;
  any.task = Task::kAnything;
  const bool found = launch_one_of<
      T, Instance<1, 16, 1, 1>, Instance<1, 16, 4, 1>, Instance<1, 16, 8, 1>, Instance<1, 24, 1, 1>,
      Instance<1, 24, 4, 1>, Instance<1, 24, 8, 1>, Instance<1, 32, 1, 1>, Instance<1, 32, 4, 1>,
      Instance<1, 32, 8, 1>, Instance<1, 48, 1, 1>, Instance<1, 48, 4, 1>, Instance<1, 64, 1, 1>,
      Instance<1, 64, 2, 1>, Instance<1, 96, 1, 1>, Instance<1, 128, 1, 1>, Instance<2, 128, 1, 1>,
      Instance<2, 192, 1, 1>, Instance<2, 256, 1, 1>, Instance<1, 32, 4, 2>, Instance<1, 48, 4, 2>,
      Instance<1, 64, 2, 2>, Instance<1, 96, 1, 2>, Instance<1, 128, 1, 2>, Instance<2, 32, 1, 2>,
      Instance<2, 64, 1, 2>, Instance<2, 96, 1, 2>, Instance<2, 128, 1, 2>, Instance<2, 192, 1, 2>,
      Instance<2, 256, 1, 2>, Instance<1, 64, 1, 1, Chunks::kAdded>,
      Instance<1, 64, 1, 2, Chunks::kAdded>, Instance<1, 128, 1, 1, Chunks::kAdded>,
      Instance<1, 128, 1, 2, Chunks::kAdded>, Instance<2, 128, 1, 1, Chunks::kAdded>,
      Instance<2, 192, 1, 1, Chunks::kAdded>, Instance<2, 256, 1, 1, Chunks::kAdded>,
      Instance<2, 256, 1, 2, Chunks::kAdded>, Instance<2, 128, 1, 2, Chunks::kAdded>,
      Instance<2, 192, 1, 2, Chunks::kAdded>, Instance<1, 64, 2, 1, Chunks::kSplit>>(p, any,
                                                                                     stream);
  if (!found) throw std::invalid_argument("no such instance of the matrix product");
}

}  // namespace minivllm::cuda::gemm
