// The first half of an RMSNorm (https://arxiv.org/abs/1910.07467) where no product before it does
// it: weighted = row * weight, and the square sums that the product after it divides by. See
// split_norm.cuh for the order of additions and kNormColumns in kernels.h for why there are halves.
// Before that residual += x where x comes as a product's partial sums, added in order as the
// product itself would (rounded first: what is weighed is what is kept).
//
// One block a row. A thread takes 8 neighbouring columns, 16 bytes, and further ones where a row is
// longer than the block: 8 neighbouring lanes hold the 64 columns of a square sum. What lane q of a
// quad holds in a product's accumulators is here pair q of these lanes.
//
// bfloat16 and float16 alone: the products that take rows like these have no other dtypes.
#include "common.cuh"
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

// The square sum of the 64 columns that 8 neighbouring lanes hold, in each of them.
template <typename T>
__device__ float square_sum(const Vec<T, kChunk>& chunk) {
  float pairs[kPairs];
#pragma unroll
  for (int q = 0; q < kPairs; ++q) {
    pairs[q] =
        split_norm::pair_square(to_float(chunk.data[2 * q]), to_float(chunk.data[2 * q + 1]));
  }
#pragma unroll
  for (int offset = 1; offset < kNormLanes; offset *= 2) {
#pragma unroll
    for (int q = 0; q < kPairs; ++q) {
      pairs[q] = __fadd_rn(pairs[q], __shfl_xor_sync(kFullMask, pairs[q], offset));
    }
  }
  return __fadd_rn(__fadd_rn(pairs[0], pairs[1]), __fadd_rn(pairs[2], pairs[3]));
}

template <typename T>
__global__ void __launch_bounds__(kMaxThreads, 1) weigh_rows_kernel(WeighRowsParams p) {
  using Chunk = Vec<T, kChunk>;
  pdl_launch_dependents();
  const int size = static_cast<int>(p.hidden_size);
  const int stride = static_cast<int>(blockDim.x) * kChunk;
  const int first = static_cast<int>(threadIdx.x) * kChunk;
  // Nobody writes weights during a step: the first may come before the wait.
  const T* weight = static_cast<const T*>(p.weight);
  Chunk weights = {};
  if (first < size) weights = *reinterpret_cast<const Chunk*>(weight + first);
  pdl_wait();

  const int64_t row = blockIdx.x;
  T* residual = static_cast<T*>(p.residual) + row * p.hidden_size;
  T* weighted = static_cast<T*>(p.weighted) + row * p.hidden_size;
  float* square_sums = p.square_sums + row * (p.hidden_size / kNormColumns);
  // All threads go round as often, as the shuffles need it.
  for (int start = first; start - first < size; start += stride) {
    const bool inside = start < size;
    Chunk values = {};
    if (inside) {
      values = *reinterpret_cast<const Chunk*>(residual + start);
      if (start > first) weights = *reinterpret_cast<const Chunk*>(weight + start);
    }
    if (inside && p.partials != nullptr) {
      float added[kChunk];
      load_sums(added, p, row, start);
#pragma unroll
      for (int i = 0; i < kChunk; ++i) {
        values.data[i] = from_float<T>(__fadd_rn(to_float(values.data[i]), added[i]));
      }
      *reinterpret_cast<Chunk*>(residual + start) = values;
    }
    const float sum = square_sum(values);
    if (!inside) continue;
    Chunk out;
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      out.data[i] = from_float<T>(__fmul_rn(to_float(values.data[i]), to_float(weights.data[i])));
    }
    *reinterpret_cast<Chunk*>(weighted + start) = out;
    if (start % kNormColumns == 0) square_sums[start / kNormColumns] = sum;
  }
}

template <typename T>
void launch_weigh_rows(const WeighRowsParams& p, Stream stream) {
  const int64_t warps = (p.hidden_size / kChunk + kWarpSize - 1) / kWarpSize;
  const int64_t threads = warps * kWarpSize < kMaxThreads ? warps * kWarpSize : kMaxThreads;
  MINIVLLM_LAUNCH(weigh_rows_kernel<T>, dim3(static_cast<unsigned>(p.num_rows)),
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
