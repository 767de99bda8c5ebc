// What every kernel here shares: launches with checks and programmatic dependent launch, vectors,
// conversions, reductions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>

#include "../kernels.h"

namespace minivllm::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kFullMask = 0xffffffffu;

inline void check(cudaError_t error, const char* file, int line) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " +
                             cudaGetErrorString(error));
  }
}
#define MINIVLLM_CHECK(call) ::minivllm::cuda::check((call), __FILE__, __LINE__)

// Waits until the kernels before this one in the stream have ended and their writes can be seen.
// Every kernel calls it before it touches memory that another kernel of the step reads or writes,
// but for what is settled (see AttentionParams::settled). At least one thread of a grid calls it
// before the grid ends, whatever there is to do: else "the kernels before" the next one were that
// grid alone.
__device__ __forceinline__ void pdl_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel in the stream start (as far as its own pdl_wait) while this one runs.
__device__ __forceinline__ void pdl_launch_dependents() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Major * 10 + minor of the current device, asked once a device.
inline int compute_capability() {
  int device = 0;
  MINIVLLM_CHECK(cudaGetDevice(&device));
  constexpr int kMaxDevices = 64;
  static int known[kMaxDevices] = {};
  if (device < kMaxDevices && known[device] != 0) return known[device];
  int major = 0, minor = 0;
  MINIVLLM_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  MINIVLLM_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  const int capability = major * 10 + minor;
  if (device < kMaxDevices) known[device] = capability;
  return capability;
}

inline int num_sms() {
  int device = 0, count = 0;
  MINIVLLM_CHECK(cudaGetDevice(&device));
  MINIVLLM_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
  return count;
}

// What a kernel is told once on each device, and again where it wants more shared memory: an SM
// cannot change its split of L1 and shared memory while it works, so with the largest share in
// every kernel the next one's blocks fit in beside those that still run.
inline void prepare(const char* file, int line, const void* kernel, size_t smem_bytes) {
  constexpr size_t kDefaultSmem = 48 * 1024;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, size_t> prepared;  // shared memory asked for
  int device = 0;
  check(cudaGetDevice(&device), file, line);
  const std::lock_guard<std::mutex> guard(mutex);
  const auto found = prepared.find({kernel, device});
  if (found != prepared.end() && smem_bytes <= found->second) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared),
        file, line);
  if (smem_bytes > kDefaultSmem) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               static_cast<int>(smem_bytes)),
          file, line);
  }
  prepared[{kernel, device}] = std::max(smem_bytes, kDefaultSmem);
}

// Launches kernel(args...) and throws with file and line when the launch fails. On sm_90 the launch
// may overlap the tail of the kernel before it: see pdl_wait.
template <typename... Params, typename... Args>
void launch(const char* file, int line, void (*kernel)(Params...), dim3 grid, dim3 block,
            size_t smem_bytes, Stream stream, Args... args) {
  prepare(file, line, reinterpret_cast<const void*>(kernel), smem_bytes);
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = smem_bytes;
  config.stream = stream;
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = compute_capability() >= 90 ? 1 : 0;
  check(cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...), file, line);
  check(cudaGetLastError(), file, line);
}
#define MINIVLLM_LAUNCH(...) ::minivllm::cuda::launch(__FILE__, __LINE__, __VA_ARGS__)

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}

// Reads what may be settled: past L1, which nobody promises to be fresh before pdl_wait.
__device__ __forceinline__ int32_t load_settled(const int32_t* from) { return __ldcg(from); }

// kSize elements moved as one aligned access of up to 16 bytes.
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Vec {
  T data[kSize];
};

// Calls f with a value of the element type that dtype names.
template <typename F>
void dispatch_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(__nv_bfloat16{});
    case DType::kFloat16:
      return f(__half{});
  }
  throw std::invalid_argument("unknown dtype " + std::to_string(static_cast<int>(dtype)));
}

// Sum over a warp; every lane gets the same bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    x += __shfl_xor_sync(kFullMask, x, offset);
  return x;
}

}  // namespace minivllm::cuda
