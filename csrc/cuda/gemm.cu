// out = x W^T with bias, residual or SiLU: which kernel runs for a shape, and which instance of
// that for Hopper. The kernels and why their results do not depend on the number of tokens:
// gemm_sm90.cuh, gemm_mma.cu, gemm_simt.cu.
#include <algorithm>

#include "common.cuh"
#include "gemm.cuh"

namespace minivllm::cuda {
namespace {

constexpr int kBlock = 64;  // elements of K in a k-block
constexpr int kTileTokens = 64;
constexpr int kFewTokens = 64;  // one tile of tokens
constexpr int kVeryFewTokens = 16;
constexpr int kWholeRing = 204 * 1024;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The largest number of k-blocks a stage that is compiled for these columns and divides K.
int stage_blocks(int columns, int64_t k, bool eight) {
  const int64_t blocks = k / kBlock;
  if (eight && columns <= 32 && blocks % 8 == 0) return 8;
  if (columns <= 48 && blocks % 4 == 0) return 4;
  if (columns == 64 && blocks % 2 == 0) return 2;
  return 1;
}

// The product as one chunk of K sees it, where the chunks are tiles of their own.
LinearParams one_chunk(const LinearParams& p) {
  LinearParams chunk = p;
  chunk.k = p.k / p.num_chunks;
  return chunk;
}

// Parts of a decoder layer, which tiles of 64 columns do for few tokens (gemm_fused.cuh), and wide
// ones in part for many (gemm_staged.cuh).
bool is_fused(const LinearParams& p) {
  return p.epilogue == Epilogue::kRopeKv || p.weighted != nullptr;
}

// A cluster for each tile, a CTA for each chunk of K. Two CTAs share an SM: the card has places for
// 62 clusters of four then, but only for 30 whose CTAs have an SM each.
bool splits(const LinearParams& p) {
  return p.num_chunks > 1 && p.partials == nullptr && p.num_tokens <= kTileTokens;
}
GemmConfig config_of_split(const LinearParams& p) {
  // Four stages up to 32 tokens. Up to 16 that leaves room on an SM for a product of many columns.
  constexpr int kRing = 96 * 1024, kRingOfVeryFewTokens = 80 * 1024;
  return {1,
          64,
          2,
          p.num_tokens <= kVeryFewTokens ? kRingOfVeryFewTokens : kRing,
          Sharing::kNone,
          Chunks::kSplit};
}

// Up to 64 tokens: the weights' way from memory decides, and how evenly they spread over the SMs.
GemmConfig config_for_few_tokens(const LinearParams& p, int num_sms) {
  GemmConfig config = {};
  config.warpgroups = 1;
  if (p.partials != nullptr) num_sms = std::max(1, num_sms / static_cast<int>(p.num_chunks));
  for (const int columns : {16, 24, 32, 48, 64, 96}) {
    config.columns = columns;
    if (ceil_div(p.n, columns) <= num_sms) break;
    if (columns == 64 && p.partials == nullptr) break;
  }
  if (p.leaders.leaders != nullptr) config.columns = 64;
  if (is_fused(p)) {
    config.columns = 64;
    config.stage_blocks = stage_blocks(64, p.k, false);
    config.ring_bytes = kWholeRing;
    return config;
  }
  const auto columns_an_sm = [&](int columns) {
    return ceil_div(ceil_div(p.n, columns), num_sms) * columns;
  };
  const bool very_few = p.num_tokens <= kVeryFewTokens;
  const int64_t more = columns_an_sm(128) - columns_an_sm(64);
  if (config.columns == 64 && (very_few ? more <= 0 : more < 0)) config.columns = 128;
  config.stage_blocks = stage_blocks(config.columns, p.k, very_few);
  // A small ring and a large one fit an SM together: products of few and of many columns take
  // turns in a layer, and each fills its ring while the one before still runs. More tokens need
  // the room themselves, and where an SM has many tiles, starts and ends hardly count.
  constexpr int kSmallRing = 96 * 1024, kLargeRing = 128 * 1024;
  config.ring_bytes = config.columns == 16 ? kSmallRing : kLargeRing;
  constexpr int kManyTiles = 4;
  const bool many_tiles = ceil_div(p.n, config.columns) > int64_t{kManyTiles} * num_sms;
  if (!very_few || many_tiles) config.ring_bytes = kWholeRing;
  // A block of the draw that follows has room beside it.
  constexpr int kRingBesideDraw = 176 * 1024;
  if (p.leaders.leaders != nullptr)
    config.ring_bytes = std::min(config.ring_bytes, kRingBesideDraw);
  return config;
}

// Clocks that a product takes, roughly: for each k16 step the slowest of an SM's filling, of L2 and
// of the tensor cores; the weights' way from memory at least. Constants: fitted to an H200.
double predicted_clocks(const LinearParams& p, const GemmConfig& config, int num_sms) {
  constexpr double kFillBytes = 53, kL2Bytes = 4200, kMemoryBytes = 2500;  // a clock
  constexpr double kOperandClocks = 16;  // 64 rows of one k16 step, from shared memory
  constexpr double kIssueClocks = 4;
  constexpr double kTileClocks = 1500, kColumnClocks = 2;  // to start, drain and store a tile
  constexpr double kStepRowBytes = 32;
  constexpr double kMerged = 0.25;  // requests for the same tokens of all SMs that L2 sees
  const double columns = config.columns;
  const double tokens =
      static_cast<double>(std::min<int64_t>(config.warpgroups * kTileTokens, p.num_tokens));
  const bool share_tokens = config.sharing == Sharing::kTokens;
  const bool share_weights = config.sharing == Sharing::kWeights;
  const int64_t token_tiles =
      ceil_div(ceil_div(p.num_tokens, config.warpgroups * kTileTokens), share_weights ? 2 : 1) *
      (share_weights ? 2 : 1);
  const int64_t column_tiles =
      ceil_div(ceil_div(p.n, config.columns), share_tokens ? 2 : 1) * (share_tokens ? 2 : 1);
  const int64_t tiles = token_tiles * column_tiles * (p.partials != nullptr ? p.num_chunks : 1);
  const double token_rows =
      tokens * (share_tokens ? 0.5 : 1.0) * (token_tiles == 1 ? kMerged : 1.0);
  const double rows = token_rows + columns * (share_weights ? 0.5 : 1.0);
  const double working = static_cast<double>(std::min<int64_t>(tiles, num_sms));
  const double fill = (tokens + columns) * kStepRowBytes / kFillBytes;
  const double l2 = working * rows * kStepRowBytes / kL2Bytes;
  const double math =
      config.warpgroups * (std::max(columns / 2, kOperandClocks + columns / 4) + kIssueClocks);
  constexpr double kUnstaged = 1.03;  // two warpgroups that store from registers
  const bool staged = config.warpgroups == 1 || config.columns >= 128;
  const double steps = static_cast<double>(p.k) / 16 * (staged ? 1.0 : kUnstaged);
  const double tile = steps * std::max({fill, l2, math}) + kTileClocks + kColumnClocks * columns;
  const double chunks = p.partials != nullptr ? static_cast<double>(p.num_chunks) : 1.0;
  const double memory =
      static_cast<double>(p.n) * static_cast<double>(p.k) * chunks * 2 / kMemoryBytes;
  constexpr double kAddingPair = 3000;  // pairs that add up chunks: seen, not explained
  const bool adding_pair =
      config.chunks == Chunks::kAdded && config.warpgroups == 1 && config.sharing != Sharing::kNone;
  return std::max(static_cast<double>(ceil_div(tiles, num_sms)) * tile, memory + kTileClocks) +
         (adding_pair ? kAddingPair : 0);
}

// Tiles of many tokens that also do the first half of a norm.
bool weighs(int columns, Sharing sharing) { return columns == 256 && sharing != Sharing::kNone; }

// More tokens: the instance with the smallest prediction.
GemmConfig config_for_many_tokens(const LinearParams& p, int num_sms) {
  GemmConfig best = {};
  double best_clocks = 0;
  const bool adds = p.num_chunks > 1 && p.partials == nullptr;
  const auto consider = [&](int warpgroups, int columns, Sharing sharing) {
    if (p.leaders.leaders != nullptr && columns % kLeaderColumns != 0) return;
    if (p.weighted != nullptr && !weighs(columns, sharing)) return;
    GemmConfig config = {};
    config.warpgroups = warpgroups;
    config.columns = columns;
    config.stage_blocks = warpgroups == 1 && !adds ? stage_blocks(columns, p.k, false) : 1;
    config.sharing = sharing;
    config.chunks = adds ? Chunks::kAdded : Chunks::kApart;
    constexpr int kRing = 204 * 1024, kRingBesideStaging = 192 * 1024, kRingBesideSums = 150 * 1024;
    config.ring_bytes = warpgroups == 2 && columns >= 128 ? kRingBesideStaging : kRing;
    if (adds && columns == 256) config.ring_bytes = kRingBesideSums;
    const double clocks = predicted_clocks(p, config, num_sms);
    if (best.columns != 0 && clocks >= best_clocks) return;
    best_clocks = clocks;
    best = config;
  };
  if (adds) {
    for (const int columns : {256, 192, 128}) {
      consider(2, columns, Sharing::kNone);
      if (p.num_tokens > 2 * kTileTokens) consider(2, columns, Sharing::kWeights);
      consider(2, columns, Sharing::kTokens);
    }
    for (const int columns : {128, 64}) {
      consider(1, columns, Sharing::kNone);
      consider(1, columns, Sharing::kTokens);
      consider(1, columns, Sharing::kWeights);
    }
    return best;
  }
  for (const int columns : {256, 192, 128, 96, 64, 32}) {
    // Staged tiles of SiLU leave in chunks of 64 outputs.
    if (columns == 192 && p.epilogue == Epilogue::kSiluMul) continue;
    if (columns >= 128) consider(2, columns, Sharing::kNone);
    if (p.num_tokens > 2 * kTileTokens) consider(2, columns, Sharing::kWeights);
    consider(2, columns, Sharing::kTokens);
  }
  for (const int columns : {128, 96, 64, 48, 32, 24, 16}) {
    // Pairs of narrow tiles are compiled for their usual stages only.
    const bool paired = columns >= 96 || (columns >= 32 && stage_blocks(columns, p.k, false) > 1);
    consider(1, columns, Sharing::kNone);
    if (paired) consider(1, columns, Sharing::kTokens);
    if (paired) consider(1, columns, Sharing::kWeights);
  }
  return best;
}

bool aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

bool wgmma_takes_weight(const LinearParams& p) {
  return (p.dtype == DType::kBFloat16 || p.dtype == DType::kFloat16) && p.n % 8 == 0 &&
         p.k % kBlock == 0 && p.n > 0 && p.k > 0 && aligned(p.weight) && aligned(p.bias) &&
         compute_capability() == 90;
}

void check_leaders(const LinearParams& p) {
  if (p.leaders.leaders == nullptr) return;
  if (p.out_dtype != DType::kFloat32 || p.num_chunks != 1 || p.partials != nullptr ||
      !linear_uses_wgmma(p))
    throw std::invalid_argument("linear: leaders are of float32 in one chain, on Hopper");
}

void check_fused(const LinearParams& p) {
  if (p.square_sums == nullptr && !is_fused(p)) return;
  if (p.partials != nullptr)
    throw std::invalid_argument("linear: sums that are left leave the layer's parts to others");
  if (!aligned(p.norm_weight) || !aligned(p.weighted) || !aligned(p.rope.cos_sin) ||
      !aligned(p.rope.kv.cache))
    throw std::invalid_argument(
        "linear: norm_weight, weighted, cos_sin and the cache must begin at a multiple of 16 "
        "bytes");
  const bool whole = p.n % kNormColumns == 0;
  const int64_t heads = p.rope.num_q_heads + 2 * p.rope.kv.num_kv_heads;
  if (p.square_sums != nullptr && p.k % kNormColumns != 0)
    throw std::invalid_argument("linear: half an RMSNorm is of k in multiples of 64");
  if (p.weighted != nullptr && (!whole || p.epilogue != Epilogue::kResidual))
    throw std::invalid_argument("linear: a norm follows a residual of 64 columns or a multiple");
  const bool weighs_many = p.weighted != nullptr && p.num_chunks > 1;
  if (is_fused(p) && !weighs_many && p.num_tokens > kMostFusedTokens)
    throw std::invalid_argument("linear: parts of a layer are for few tokens");
  if (p.epilogue == Epilogue::kRopeKv &&
      (p.rope.kv.head_dim != kNormColumns || heads * kNormColumns != p.n))
    throw std::invalid_argument("linear: kRopeKv is for q, k and v of heads of 64");
}

GemmConfig choose_shape(const LinearParams& p, int num_sms) {
  if (splits(p)) return config_of_split(p);
  if (p.num_chunks > 1 && p.partials == nullptr) return config_for_many_tokens(p, num_sms);
  const LinearParams tile = one_chunk(p);
  return p.num_tokens <= kFewTokens ? config_for_few_tokens(tile, num_sms)
                                    : config_for_many_tokens(tile, num_sms);
}

// Wide tiles do the first half of a norm where they are what the product wants; else, of more
// tokens than the other tiles do it for, it is a kernel of its own.
bool weighs_apart(const LinearParams& p, int num_sms) {
  if (p.weighted == nullptr || p.num_tokens <= kMostFusedTokens || p.out_stride != p.n)
    return false;
  LinearParams product = p;
  product.weighted = nullptr;
  const GemmConfig best = choose_shape(product, num_sms);
  return !weighs(best.columns, best.sharing);
}
void weigh(const LinearParams& p, Stream stream) {
  WeighRowsParams rows = {};
  rows.weighted = p.weighted;
  rows.square_sums = p.new_square_sums;
  rows.residual = p.out;
  rows.weight = p.norm_weight;
  rows.num_rows = p.num_tokens;
  rows.hidden_size = p.n;
  rows.dtype = p.dtype;
  weigh_rows(rows, stream);
}

}  // namespace

Task task_of(const LinearParams& p, const GemmConfig& config) {
  const bool one_warpgroup =
      config.warpgroups == 1 && config.sharing == Sharing::kNone && config.chunks != Chunks::kAdded;
  const bool one_token_tile = p.num_tokens <= kTileTokens && p.n % config.columns == 0;
  if (p.bias != nullptr || (one_warpgroup && !one_token_tile)) return Task::kAnything;
  if (p.partials != nullptr) return Task::kLeaveSums;
  const bool normed = p.square_sums != nullptr;
  if (p.weighted != nullptr) return normed ? Task::kAnything : Task::kWeigh;
  if (p.leaders.leaders != nullptr) return Task::kLogits;
  if (normed && p.epilogue == Epilogue::kRopeKv) return Task::kRopeKv;
  return normed && p.epilogue == Epilogue::kSiluMul ? Task::kSiluMul : Task::kAnything;
}

GemmConfig choose_gemm_config(const LinearParams& p, int num_sms) {
  GemmConfig config = choose_shape(p, num_sms);
  config.task = task_of(p, config);
  return config;
}

// Narrow weights have too few tiles to pull at the memory's whole width, and chains that are long
// beside the time that takes: four CTAs share a tile's K. A pair of SiLU needs its whole sums.
int64_t linear_chunks(int64_t n, int64_t k, Epilogue epilogue) {
  constexpr int64_t kChunks = 4, kNarrow = 8192, kLongest = 8;  // k-blocks in a stage, at most
  const bool fits = k % (kChunks * kLongest * kBlock) == 0;
  return epilogue != Epilogue::kSiluMul && n <= kNarrow && fits ? kChunks : 1;
}

bool linear_uses_wgmma(const LinearParams& p) {
  const bool is_float = p.out_dtype == DType::kFloat32;
  return wgmma_takes_weight(p) &&
         (p.out_dtype == p.dtype || (is_float && p.epilogue == Epilogue::kNone)) &&
         p.x_stride % 8 == 0 && p.out_stride % 8 == 0 && aligned(p.x) && aligned(p.out);
}

void linear(const LinearParams& p, Stream stream) {
  if (p.num_tokens == 0 || p.n == 0) return;
  if (p.num_chunks != 1 && p.num_chunks != linear_chunks(p.n, p.k, p.epilogue))
    throw std::invalid_argument("linear: a shape has one number of chunks");
  const bool rounded = p.out_dtype == p.dtype;
  if (!rounded && (p.out_dtype != DType::kFloat32 || p.epilogue != Epilogue::kNone))
    throw std::invalid_argument("linear: only a plain product leaves in another dtype");
  check_leaders(p);
  check_fused(p);
  if (!linear_uses_wgmma(p)) {
    if (p.partials != nullptr) throw std::invalid_argument("linear: no kernel leaves these sums");
    if (is_fused(p) || p.square_sums != nullptr)
      throw std::invalid_argument("linear: only the kernel for Hopper does parts of a layer");
    if (p.dtype == DType::kFloat32) return launch_gemm_simt(p, stream);
    // Where it is only x or out that stands in the way, the chains are those of other calls.
    constexpr int kParts = 4;
    const int parts = wgmma_takes_weight(p) ? static_cast<int>(p.num_chunks) : kParts;
    return launch_gemm_mma(p, parts, stream);
  }
  if (weighs_apart(p, num_sms())) {
    LinearParams product = p;
    product.norm_weight = product.weighted = nullptr;
    product.new_square_sums = nullptr;
    linear(product, stream);
    return weigh(p, stream);
  }
  const GemmConfig config = choose_gemm_config(p, num_sms());
  if (p.dtype == DType::kBFloat16) return launch_gemm_bf16(p, config, stream);
  launch_gemm_fp16(p, config, stream);
}

}  // namespace minivllm::cuda
