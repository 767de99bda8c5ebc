// Hopper's matrix products of a warpgroup, one thin wrapper each. Operand rules: PTX ISA,
// "Asynchronous warpgroup level matrix instructions".
#pragma once

#include "sm90.cuh"

namespace minivllm::cuda::sm90 {

// Low word of the descriptor of a K-major tile with the 128-byte swizzle, rows 128 bytes apart.
// One k16 step further is 32 bytes: add 2. The high word is kDescriptorHigh.
__device__ __forceinline__ uint32_t descriptor_low(uint32_t address) {
  return (address >> 4) | (1u << 16);
}
constexpr uint32_t kDescriptorHigh = (1u << 30) | (kSwizzleAtom >> 4);  // swizzle, 8-row stride

__device__ __forceinline__ uint64_t descriptor(uint32_t low) {
  return (static_cast<uint64_t>(kDescriptorHigh) << 32) | low;
}

// Orders register and shared accesses before the wgmmas that follow.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most kPending committed groups are still running.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Keeps the compiler from moving accumulators across the wgmmas that own them.
template <int kSize>
__device__ __forceinline__ void pin_registers(float (&values)[kSize]) {
#pragma unroll
  for (int i = 0; i < kSize; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// wgmma<T>(d, a, b, accumulate): d[64, n] (+)= a[64, 16] b[n, 16]^T, all 128 threads of a
// warpgroup, n = twice d's length. Thread t holds, for i < n / 8 and h < 2, the elements
//   row 16 * (t / 32) + 8 * h + (t % 32) / 4, columns 8 * i + 2 * (t % 4) + {0, 1}
// in d[4 * i + 2 * h + {0, 1}].
#define MINIVLLM_R4 "%0, %1, %2, %3"
#define MINIVLLM_R8 MINIVLLM_R4 ", %4, %5, %6, %7"
#define MINIVLLM_R12 MINIVLLM_R8 ", %8, %9, %10, %11"
#define MINIVLLM_R16 MINIVLLM_R12 ", %12, %13, %14, %15"
#define MINIVLLM_R24 MINIVLLM_R16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define MINIVLLM_R32 MINIVLLM_R24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define MINIVLLM_R48 \
  MINIVLLM_R32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define MINIVLLM_R64 \
  MINIVLLM_R48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MINIVLLM_R96                                                                 \
  MINIVLLM_R64                                                                       \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define MINIVLLM_R128                                                                \
  MINIVLLM_R96                                                                       \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109" \
  ", %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122"   \
  ", %123, %124, %125, %126, %127"
#define MINIVLLM_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MINIVLLM_F8(i) MINIVLLM_F4(i), MINIVLLM_F4(i + 4)
#define MINIVLLM_F16(i) MINIVLLM_F8(i), MINIVLLM_F8(i + 8)
#define MINIVLLM_F32(i) MINIVLLM_F16(i), MINIVLLM_F16(i + 16)
#define MINIVLLM_F64(i) MINIVLLM_F32(i), MINIVLLM_F32(i + 32)
#define MINIVLLM_WGMMA_TYPED(n, type, registers, a_index, b_index, p_index, ...)              \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_index                                  \
               ", 0;\n"                                                                       \
               "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" registers \
               "}, %" #a_index ", %" #b_index ", p, 1, 1, 0, 0;\n}\n"                         \
               : __VA_ARGS__                                                                  \
               : "l"(a), "l"(b), "r"(accumulate))
#define MINIVLLM_WGMMA(n, registers, a_index, b_index, p_index, ...)                      \
  template <typename T>                                                                   \
  __device__ __forceinline__ void wgmma(float (&d)[n / 2], uint64_t a, uint64_t b,        \
                                        int accumulate) {                                 \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                     \
      MINIVLLM_WGMMA_TYPED(n, "bf16", registers, a_index, b_index, p_index, __VA_ARGS__); \
    } else {                                                                              \
      static_assert(std::is_same_v<T, __half>);                                           \
      MINIVLLM_WGMMA_TYPED(n, "f16", registers, a_index, b_index, p_index, __VA_ARGS__);  \
    }                                                                                     \
  }
MINIVLLM_WGMMA(8, MINIVLLM_R4, 4, 5, 6, MINIVLLM_F4(0))
MINIVLLM_WGMMA(16, MINIVLLM_R8, 8, 9, 10, MINIVLLM_F8(0))
MINIVLLM_WGMMA(24, MINIVLLM_R12, 12, 13, 14, MINIVLLM_F8(0), MINIVLLM_F4(8))
MINIVLLM_WGMMA(32, MINIVLLM_R16, 16, 17, 18, MINIVLLM_F16(0))
MINIVLLM_WGMMA(48, MINIVLLM_R24, 24, 25, 26, MINIVLLM_F16(0), MINIVLLM_F8(16))
MINIVLLM_WGMMA(64, MINIVLLM_R32, 32, 33, 34, MINIVLLM_F32(0))
MINIVLLM_WGMMA(96, MINIVLLM_R48, 48, 49, 50, MINIVLLM_F32(0), MINIVLLM_F16(32))
MINIVLLM_WGMMA(128, MINIVLLM_R64, 64, 65, 66, MINIVLLM_F64(0))
MINIVLLM_WGMMA(192, MINIVLLM_R96, 96, 97, 98, MINIVLLM_F64(0), MINIVLLM_F32(64))
MINIVLLM_WGMMA(256, MINIVLLM_R128, 128, 129, 130, MINIVLLM_F64(0), MINIVLLM_F64(64))
#undef MINIVLLM_R4
#undef MINIVLLM_R8
#undef MINIVLLM_R12
#undef MINIVLLM_R16
#undef MINIVLLM_R24
#undef MINIVLLM_R32
#undef MINIVLLM_R48
#undef MINIVLLM_R64
#undef MINIVLLM_R96
#undef MINIVLLM_R128
#undef MINIVLLM_F4
#undef MINIVLLM_F8
#undef MINIVLLM_F16
#undef MINIVLLM_F32
#undef MINIVLLM_F64
#undef MINIVLLM_WGMMA_TYPED
#undef MINIVLLM_WGMMA

}  // namespace minivllm::cuda::sm90
