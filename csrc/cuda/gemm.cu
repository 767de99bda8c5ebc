// out = x W^T with bias, residual or SiLU: which instance runs for a shape. The kernel and why its
// results do not depend on the choice: gemm_sm90.cuh.
#include <algorithm>

#include "common.cuh"
#include "gemm.cuh"

namespace minivllm::cuda {
namespace {

constexpr int kBlock = 64;  // elements of K in a k-block
constexpr int kTileTokens = 64;

// Clocks that a launch takes on this card, roughly: the largest of what its memory, its shared
// memory's filling and its tensor cores need. Constants: measured on an H200.
double predicted_clocks(const LinearParams& p, int warpgroups, int columns, int num_sms) {
  constexpr double kDramBytesPerClock = 2500;  // the whole card
  constexpr double kFillBytesPerClock = 50;    // one SM from L2
  constexpr double kOperandClocks = 16;        // 64 rows of one k16 step from shared memory
  constexpr double kIssueClocks = 2;
  constexpr double kTileClocks = 1200;  // to start, drain and store a tile
  constexpr double kColumnClocks = 6;   // storing a column of a tile
  const int64_t tile_tokens = static_cast<int64_t>(warpgroups) * kTileTokens;
  const int64_t token_tiles = (p.num_tokens + tile_tokens - 1) / tile_tokens;
  const int64_t column_tiles = (p.n + columns - 1) / columns;
  const int64_t waves = (token_tiles * column_tiles + num_sms - 1) / num_sms;
  const double rows = static_cast<double>(std::min(p.num_tokens, tile_tokens) + columns);
  const double steps = static_cast<double>(p.k) / 16;
  const double fill = rows * 32 / kFillBytesPerClock;
  const double math =
      warpgroups * (std::max(columns / 2.0, kOperandClocks + columns / 4.0) + kIssueClocks);
  const double tile = steps * std::max(fill, math) + kTileClocks + kColumnClocks * columns;
  const double dram = static_cast<double>(p.n) * static_cast<double>(p.k) * 2 / kDramBytesPerClock;
  constexpr double kWaveClocks = 200;
  return std::max(waves * tile, dram + kTileClocks + kColumnClocks * columns) + waves * kWaveClocks;
}

}  // namespace

GemmConfig choose_gemm_config(const LinearParams& p, int num_sms) {
  GemmConfig best = {};
  double best_clocks = 0;
  for (int warpgroups = 1; warpgroups <= 2; ++warpgroups) {
    if (warpgroups == 2 && p.num_tokens <= kTileTokens) break;
    for (const int columns : kGemmColumns[warpgroups - 1]) {
      if (columns == 0) break;
      // Staged tiles of SiLU leave in chunks of 64 outputs.
      if (warpgroups == 2 && columns == 192 && p.epilogue == Epilogue::kSiluMul) continue;
      const double clocks = predicted_clocks(p, warpgroups, columns, num_sms);
      if (best.columns != 0 && clocks >= best_clocks) continue;
      best_clocks = clocks;
      best.warpgroups = warpgroups;
      best.columns = columns;
    }
  }
  // Narrow tiles take several k-blocks a stage: their wgmmas are short beside a barrier's wait.
  const int64_t blocks = p.k / kBlock;
  best.stage_blocks = 1;
  if (best.warpgroups == 1 && best.columns <= 48 && blocks % 4 == 0) best.stage_blocks = 4;
  if (best.warpgroups == 1 && best.columns == 64 && blocks % 2 == 0) best.stage_blocks = 2;
  best.prefetch_bytes = 0;
  best.flat = false;
  best.sharing = Sharing::kNone;
  // One warpgroup leaves room for the next kernel's CTA.
  best.ring_bytes = best.warpgroups == 1 ? 104 * 1024 : 192 * 1024;
  best.ctas_per_sm = 1;
  return best;
}

bool linear_supported(const LinearParams& p) {
  const auto aligned = [](const void* pointer) {
    return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
  };
  const bool is_float = p.out_dtype == DType::kFloat32;
  return (p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16) &&
         (p.out_dtype == p.dtype || (is_float && p.epilogue == Epilogue::kNone)) && p.n % 8 == 0 &&
         p.k % kBlock == 0 && p.n > 0 && p.k > 0 && p.x_stride % 8 == 0 && p.out_stride % 8 == 0 &&
         aligned(p.x) && aligned(p.weight) && aligned(p.out) && aligned(p.bias) &&
         compute_capability() == 90;
}

void linear(const LinearParams& p, Stream stream) {
  if (p.num_tokens == 0) return;
  if (!linear_supported(p)) throw std::invalid_argument("linear: no kernel for this shape");
  const GemmConfig config = choose_gemm_config(p, num_sms());
  if (p.dtype == DType::kBFloat16) return launch_gemm_bf16(p, config, stream);
  launch_gemm_fp16(p, config, stream);
}

}  // namespace minivllm::cuda
