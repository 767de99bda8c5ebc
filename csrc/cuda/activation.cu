// out = silu(x[:, :size]) * x[:, size:], silu(g) = g / (1 + e^-g), in float with one rounding.
// A thread makes 16 bytes of output where the addresses allow, else one element.
#include "common.cuh"

namespace minivllm::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kVecBytes = 16;

template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) silu_mul_kernel(SiluMulParams p, int64_t vecs_per_row) {
  pdl_launch_dependents();
  pdl_wait();
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (index >= p.num_tokens * vecs_per_row) return;
  const int64_t token = index / vecs_per_row;
  const int64_t start = (index - token * vecs_per_row) * kVec;
  const T* x = static_cast<const T*>(p.x) + token * p.x_stride + start;
  const auto gate = *reinterpret_cast<const Vec<T, kVec>*>(x);
  const auto up = *reinterpret_cast<const Vec<T, kVec>*>(x + p.size);
  Vec<T, kVec> out;
#pragma unroll
  for (int i = 0; i < kVec; ++i) {
    const float g = to_float(gate.data[i]);
    out.data[i] = from_float<T>(g / (1.0f + __expf(-g)) * to_float(up.data[i]));
  }
  *reinterpret_cast<Vec<T, kVec>*>(static_cast<T*>(p.out) + token * p.size + start) = out;
}

template <typename T, int kVec>
void launch_silu_mul(const SiluMulParams& p, Stream stream) {
  const int64_t vecs_per_row = p.size / kVec;
  const int64_t blocks = (p.num_tokens * vecs_per_row + kThreads - 1) / kThreads;
  MINIVLLM_LAUNCH(silu_mul_kernel<T, kVec>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), 0,
                  stream, p, vecs_per_row);
}

}  // namespace

void silu_mul(const SiluMulParams& p, Stream stream) {
  if (p.num_tokens == 0 || p.size == 0) return;
  dispatch_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kVec = kVecBytes / sizeof(T);
    const auto addresses = reinterpret_cast<uintptr_t>(p.out) | reinterpret_cast<uintptr_t>(p.x);
    const bool aligned = addresses % kVecBytes == 0 && p.size % kVec == 0 && p.x_stride % kVec == 0;
    if (aligned) return launch_silu_mul<T, kVec>(p, stream);
    launch_silu_mul<T, 1>(p, stream);
  });
}

}  // namespace minivllm::cuda
