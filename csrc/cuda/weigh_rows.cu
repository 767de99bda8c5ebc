// The first half of an RMSNorm (https://arxiv.org/abs/1910.07467) where no product before it does
// it: weighted = row * weight, and the square sums that the product after it divides by. See
// split_norm.cuh for the order of additions and kNormColumns in kernels.h for why there are halves.
// Before that residual += x where x comes as a product's partial sums, added in order as the
// product itself would (rounded first: what is weighed is what is kept), or residual = the tokens'
// rows of the embedding, at a step's start.
//
// One block a row, or a few where there are very many and what counts is how much is on its way. A
// thread takes 8 neighbouring columns, 16 bytes, and further ones where a row is longer than the
// block: 8 neighbouring lanes hold the 64 columns of a square sum. What lane q of a quad holds in a
// product's accumulators is here pair q of these lanes.
//
// bfloat16 and float16 alone: the products that take rows like these have no other dtypes.
#include "embedding.cuh"
#include "partial_sums.cuh"
#include "split_norm.cuh"

namespace minivllm::cuda {
namespace {

constexpr int kMaxThreads = 512;
constexpr int kChunk = 8;  // columns of a thread
constexpr int kChunkBytes = 16;
constexpr int kPairs = kChunk / 2;
constexpr int kNormLanes = static_cast<int>(kNormColumns) / kChunk;  // that hold a square sum
static_assert(kPairs == split_norm::kQuad && kNormLanes == 8);

// What a product's own epilogue would add to columns start .. start + kChunk of a row.
__device__ void load_sums(float (&sums)[kChunk], const WeighRowsParams& p, int64_t row, int start) {
  const float* from = p.partials + row * p.hidden_size + start;
  const int64_t size = p.num_rows * p.hidden_size;
  add_parts(sums, p.num_partials, [&](float (&values)[kChunk], int64_t part) {
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) load_four(values + i, from + part * size + i);
  });
}

// The square sum of the 64 columns that 8 neighbouring lanes hold, in each of them. Each pair is
// added up over the lanes, then the pairs: a lane gives those away that another goes on with.
template <typename T>
__device__ float square_sum(const Vec<T, kChunk>& chunk) {
  float pairs[kPairs];
#pragma unroll
  for (int q = 0; q < kPairs; ++q) {
    pairs[q] =
        split_norm::pair_square(to_float(chunk.data[2 * q]), to_float(chunk.data[2 * q + 1]));
  }
  const auto add_other = [](float kept, float given, int offset) {
    return __fadd_rn(kept, __shfl_xor_sync(kFullMask, given, offset));
  };
  const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
  const float low = add_other(odd ? pairs[1] : pairs[0], odd ? pairs[0] : pairs[1], 1);
  const float high = add_other(odd ? pairs[3] : pairs[2], odd ? pairs[2] : pairs[3], 1);
  float sum = add_other(upper ? high : low, upper ? low : high, 2);  // of pair lane % 4
  sum = add_other(sum, sum, 4);
  sum = add_other(sum, sum, 1);
  return add_other(sum, sum, 2);
}

enum class From { kResidual, kPartials, kEmbedding };

template <typename T, From kFrom, int kRows>
__global__ void __launch_bounds__(kMaxThreads, kFrom == From::kPartials ? 1 : 2)
    weigh_rows_kernel(WeighRowsParams p) {
  using Chunk = Vec<T, kChunk>;
  if (kFrom != From::kEmbedding || p.embedding.first) pdl_launch_dependents();
  const int size = static_cast<int>(p.hidden_size);
  const int stride = static_cast<int>(blockDim.x) * kChunk;
  const int first = static_cast<int>(threadIdx.x) * kChunk;
  // Nobody writes weights during a step: the first may come before the wait.
  const T* weight = static_cast<const T*>(p.weight);
  Chunk weights = {};
  if (first < size) weights = *reinterpret_cast<const Chunk*>(weight + first);
  pdl_wait();
  // In this order, as a step's first kernel that does not begin a graph: see embedding.cu.
  if constexpr (kFrom == From::kEmbedding) pdl_launch_dependents();

  const int64_t first_row = int64_t{blockIdx.x} * kRows;
  const T* from[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = min(first_row + i, p.num_rows - 1);
    if constexpr (kFrom == From::kEmbedding) {
      from[i] = static_cast<const T*>(p.embedding.weight) +
                embedding_row(p.embedding, row) * p.hidden_size;
    } else {
      from[i] = static_cast<const T*>(p.residual) + row * p.hidden_size;
    }
  }
  // All threads go round as often, as the shuffles need it.
  for (int start = first; start - first < size; start += stride) {
    const bool inside = start < size;
    Chunk values[kRows] = {};
    if (inside) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) values[i] = *reinterpret_cast<const Chunk*>(from[i] + start);
      if (start > first) weights = *reinterpret_cast<const Chunk*>(weight + start);
    }
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int64_t row = first_row + i;
      const bool live = inside && row < p.num_rows;
      const int64_t at = row * p.hidden_size + start;
      if constexpr (kFrom == From::kPartials) {
        if (live) {
          float added[kChunk];
          load_sums(added, p, row, start);
#pragma unroll
          for (int j = 0; j < kChunk; ++j) {
            values[i].data[j] = from_float<T>(__fadd_rn(to_float(values[i].data[j]), added[j]));
          }
        }
      }
      if (kFrom != From::kResidual && live)
        *reinterpret_cast<Chunk*>(static_cast<T*>(p.residual) + at) = values[i];
      const float sum = square_sum(values[i]);
      if (!live) continue;
      Chunk out;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) {
        out.data[j] =
            from_float<T>(__fmul_rn(to_float(values[i].data[j]), to_float(weights.data[j])));
      }
      *reinterpret_cast<Chunk*>(static_cast<T*>(p.weighted) + at) = out;
      if (start % kNormColumns == 0) p.square_sums[at / kNormColumns] = sum;
    }
  }
}

template <typename T>
void launch_weigh_rows(const WeighRowsParams& p, Stream stream) {
  constexpr int kFewRows = 1, kRowsOfMany = 4;
  constexpr int64_t kMany = 1024;
  const int64_t warps = (p.hidden_size / kChunk + kWarpSize - 1) / kWarpSize;
  const int64_t threads = warps * kWarpSize < kMaxThreads ? warps * kWarpSize : kMaxThreads;
  const bool embeds = p.embedding.out != nullptr;
  const bool many = p.num_rows > kMany && p.partials == nullptr;
  const auto kernel = p.partials != nullptr ? weigh_rows_kernel<T, From::kPartials, kFewRows>
                      : embeds ? (many ? weigh_rows_kernel<T, From::kEmbedding, kRowsOfMany>
                                       : weigh_rows_kernel<T, From::kEmbedding, kFewRows>)
                      : many   ? weigh_rows_kernel<T, From::kResidual, kRowsOfMany>
                               : weigh_rows_kernel<T, From::kResidual, kFewRows>;
  const int64_t rows = many ? kRowsOfMany : kFewRows;
  MINIVLLM_LAUNCH(kernel, dim3(static_cast<unsigned>((p.num_rows + rows - 1) / rows)),
                  dim3(static_cast<unsigned>(threads)), 0, stream, p);
}

void check_alignment(const char* name, const void* pointer) {
  if (reinterpret_cast<uintptr_t>(pointer) % kChunkBytes == 0) return;
  throw std::invalid_argument(std::string("weigh_rows: ") + name +
                              " must begin at a multiple of 16 bytes");
}

}  // namespace

void weigh_rows(const WeighRowsParams& p, Stream stream) {
  constexpr int64_t kLargest = 4 * kMaxThreads * kChunk;  // that was tested
  if (p.hidden_size % kNormColumns != 0 || p.hidden_size > kLargest) {
    throw std::invalid_argument(
        "weigh_rows: hidden_size must be a multiple of " + std::to_string(kNormColumns) +
        " up to " + std::to_string(kLargest) + ", not " + std::to_string(p.hidden_size));
  }
  check_alignment("weighted", p.weighted);
  check_alignment("residual", p.residual);
  check_alignment("weight", p.weight);
  check_alignment("partials", p.partials);
  check_alignment("embedding", p.embedding.weight);
  if (p.embedding.out != nullptr && (p.embedding.out != p.residual || p.partials != nullptr))
    throw std::invalid_argument("weigh_rows: an embedding is the residual, and has no partials");
  if (p.num_rows == 0 || p.hidden_size == 0) return;
  switch (p.dtype) {
    case DType::kBFloat16:
      return launch_weigh_rows<__nv_bfloat16>(p, stream);
    case DType::kFloat16:
      return launch_weigh_rows<__half>(p, stream);
    default:
      throw std::invalid_argument("weigh_rows: rows must be bfloat16 or float16");
  }
}

}  // namespace minivllm::cuda
