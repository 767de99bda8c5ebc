// out = x / sqrt(mean(x^2) + eps) * weight, https://arxiv.org/abs/1910.07467, after residual += x
// where there is a residual (rounded first: what is normalised is what is kept).
//
// Where x comes as a product's partial sums they are added in order first, as the product itself
// would.
//
// One block a row. A thread owns chunks of 16 bytes and keeps them in registers, so that a row is
// read once. Which thread adds what depends on the row's size alone, not on how it is loaded:
// addresses that are no multiple of 16 are read element by element into the same places.
#include "common.cuh"
#include "partial_sums.cuh"

namespace minivllm::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kChunkBytes = 16;

template <typename T>
constexpr int kChunk = kChunkBytes / sizeof(T);

// Elements start .. start + kChunk of a row; 0 past its end.
template <typename T, bool kAligned>
__device__ Vec<T, kChunk<T>> load_chunk(const T* row, int start, int size) {
  Vec<T, kChunk<T>> chunk = {};
  if constexpr (kAligned) {
    if (start < size) chunk = *reinterpret_cast<const Vec<T, kChunk<T>>*>(row + start);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      if (start + i < size) chunk.data[i] = row[start + i];
    }
  }
  return chunk;
}

template <typename T, bool kAligned>
__device__ void store_chunk(T* row, int start, int size, const Vec<T, kChunk<T>>& chunk) {
  if constexpr (kAligned) {
    if (start < size) *reinterpret_cast<Vec<T, kChunk<T>>*>(row + start) = chunk;
  } else {
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      if (start + i < size) row[start + i] = chunk.data[i];
    }
  }
}

// Within a warp by butterflies, then the warps' sums the same way: one barrier.
__device__ float block_sum(float x) {
  __shared__ float warp_sums[kMaxThreads / kWarpSize];
  const int lane = threadIdx.x % kWarpSize;
  x = warp_sum(x);
  if (lane == 0) warp_sums[threadIdx.x / kWarpSize] = x;
  __syncthreads();
  const int num_warps = blockDim.x / kWarpSize;
  return warp_sum(lane < num_warps ? warp_sums[lane] : 0.0f);
}

// x from a product's partial sums, in float: what the product's own epilogue would add.
template <int kBatch, int kSize, bool kAligned>
__device__ void load_sums(float (&sums)[kSize], const RmsNormParams& p, int64_t row, int start) {
  const int size = static_cast<int>(p.hidden_size);
#pragma unroll
  for (int i = 0; i < kSize; ++i) sums[i] = 0.0f;
  if (start >= size) return;
  const float* first = p.partials + row * p.hidden_size + start;
  add_parts<kBatch>(sums, p.num_partials, [&](float (&values)[kSize], int64_t part) {
    const float* from = first + part * p.num_rows * p.hidden_size;
#pragma unroll
    for (int i = 0; i < kSize; i += kAligned ? 4 : 1) {
      if constexpr (kAligned) {
        load_four(values + i, from + i);
      } else {
        values[i] = start + i < size ? from[i] : 0.0f;
      }
    }
  });
}

template <typename T, int kChunksPerThread, bool kAligned>
__global__ void __launch_bounds__(kMaxThreads, 1) rms_norm_kernel(RmsNormParams p) {
  pdl_launch_dependents();
  const int size = static_cast<int>(p.hidden_size);
  const auto start_of = [](int chunk) {
    return (chunk * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kChunk<T>;
  };
  // Nobody writes weights during a step: they may come before the wait. Only where there are
  // registers to hold them: else late, from L2.
  constexpr bool kEarlyWeight = kChunksPerThread == 1;
  constexpr int kBatch = kChunksPerThread == 1 && kAligned ? 4 : 1;
  const T* weight = static_cast<const T*>(p.weight);
  Vec<T, kChunk<T>> weights = {};
  if constexpr (kEarlyWeight) weights = load_chunk<T, kAligned>(weight, start_of(0), size);
  pdl_wait();

  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
  T* residual = static_cast<T*>(p.residual) + row * p.hidden_size;
  const bool adds = p.residual != nullptr;
  Vec<T, kChunk<T>> values[kChunksPerThread];
#pragma unroll
  for (int c = 0; c < kChunksPerThread; ++c) {
    if (p.partials == nullptr) values[c] = load_chunk<T, kAligned>(x, start_of(c), size);
  }
  float sum = 0.0f;
#pragma unroll
  for (int c = 0; c < kChunksPerThread; ++c) {
    if (adds) {
      const auto kept = load_chunk<T, kAligned>(residual, start_of(c), size);
      float added[kChunk<T>];
#pragma unroll
      for (int i = 0; i < kChunk<T>; ++i) added[i] = to_float(values[c].data[i]);
      if (p.partials != nullptr) load_sums<kBatch, kChunk<T>, kAligned>(added, p, row, start_of(c));
#pragma unroll
      for (int i = 0; i < kChunk<T>; ++i) {
        values[c].data[i] = from_float<T>(to_float(kept.data[i]) + added[i]);
      }
      store_chunk<T, kAligned>(residual, start_of(c), size, values[c]);
    }
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      const float value = to_float(values[c].data[i]);
      sum = fmaf(value, value, sum);
    }
  }
  const float scale = rsqrtf(block_sum(sum) / static_cast<float>(size) + p.eps);

  T* out = static_cast<T*>(p.out) + row * p.hidden_size;
#pragma unroll
  for (int c = 0; c < kChunksPerThread; ++c) {
    if constexpr (!kEarlyWeight) weights = load_chunk<T, kAligned>(weight, start_of(c), size);
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      values[c].data[i] =
          from_float<T>(to_float(values[c].data[i]) * scale * to_float(weights.data[i]));
    }
    store_chunk<T, kAligned>(out, start_of(c), size, values[c]);
  }
}

template <typename T, int kChunksPerThread>
void launch_rms_norm(const RmsNormParams& p, int threads, bool aligned, Stream stream) {
  const auto kernel = aligned ? rms_norm_kernel<T, kChunksPerThread, true>
                              : rms_norm_kernel<T, kChunksPerThread, false>;
  MINIVLLM_LAUNCH(kernel, dim3(static_cast<unsigned>(p.num_rows)),
                  dim3(static_cast<unsigned>(threads)), 0, stream, p);
}

}  // namespace

void rms_norm(const RmsNormParams& p, Stream stream) {
  if (p.num_rows == 0 || p.hidden_size == 0) return;
  dispatch_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    const int64_t num_chunks = (p.hidden_size + kChunk<T> - 1) / kChunk<T>;
    const int64_t warps = (num_chunks + kWarpSize - 1) / kWarpSize;
    const int threads =
        static_cast<int>(warps * kWarpSize < kMaxThreads ? warps * kWarpSize : kMaxThreads);
    const auto addresses = reinterpret_cast<uintptr_t>(p.out) | reinterpret_cast<uintptr_t>(p.x) |
                           reinterpret_cast<uintptr_t>(p.residual) |
                           reinterpret_cast<uintptr_t>(p.weight) |
                           reinterpret_cast<uintptr_t>(p.partials);
    const bool aligned = addresses % kChunkBytes == 0 && p.hidden_size % kChunk<T> == 0 &&
                         p.x_stride % kChunk<T> == 0;
    if (num_chunks <= threads) return launch_rms_norm<T, 1>(p, threads, aligned, stream);
    if (num_chunks <= 2 * threads) return launch_rms_norm<T, 2>(p, threads, aligned, stream);
    if (num_chunks <= 4 * threads) return launch_rms_norm<T, 4>(p, threads, aligned, stream);
    throw std::invalid_argument("rms_norm: no kernel for hidden_size " +
                                std::to_string(p.hidden_size));
  });
}

}  // namespace minivllm::cuda
