// wgmma with the left operand in registers, and with a right operand whose rows are the depth of
// the product (values: [keys][head_dim]). PTX ISA, "Asynchronous warpgroup level matrix
// instructions".
#pragma once

#include "wgmma.cuh"

namespace minivllm::cuda::attention {

// Descriptor of 16 rows (the depth) of panels [64 rows][64] with the 128-byte swizzle, one panel
// for each 64 columns of the product. The stride field steps over 8 rows, the leading field over
// panels. The low word; the high one is sm90::kDescriptorHigh.
__device__ __forceinline__ uint32_t transposed_descriptor_low(uint32_t address, int panel_bytes) {
  return (static_cast<uint32_t>(panel_bytes >> 4) << 16) | (address >> 4);
}

#define MINIVLLM_R32                                                                  \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, " \
  "%18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define MINIVLLM_R64                                                                   \
  MINIVLLM_R32                                                                         \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define MINIVLLM_F4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MINIVLLM_F16(i) MINIVLLM_F4(i), MINIVLLM_F4(i + 4), MINIVLLM_F4(i + 8), MINIVLLM_F4(i + 12)
#define MINIVLLM_F32(i) MINIVLLM_F16(i), MINIVLLM_F16(i + 16)
#define MINIVLLM_WGMMA_TYPED(n, type, registers, a_registers, b_index, p_index, t_index, ...)      \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #p_index                                       \
               ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " " registers \
               "}, {" a_registers "}, %" #b_index ", p, 1, 1, %" #t_index ";\n}\n"                 \
               : __VA_ARGS__                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),              \
                 "n"(kTransposed ? 1 : 0))
// d[64, n] (+)= a[64, 16] b, n = twice d's length: b is [n, 16], or [16, n] where kTransposed.
// Layout of d as in sm90::wgmma; a holds what d's columns 16 k .. 16 k + 15 would, in pairs of 16
// bits.
#define MINIVLLM_WGMMA(n, ...)                                                               \
  template <typename T, bool kTransposed>                                                    \
  __device__ __forceinline__ void wgmma_registers(float (&d)[n / 2], const uint32_t (&a)[4], \
                                                  uint64_t b, int accumulate) {              \
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {                                        \
      MINIVLLM_WGMMA_TYPED(n, "bf16", __VA_ARGS__);                                          \
    } else {                                                                                 \
      static_assert(std::is_same_v<T, __half>);                                              \
      MINIVLLM_WGMMA_TYPED(n, "f16", __VA_ARGS__);                                           \
    }                                                                                        \
  }
MINIVLLM_WGMMA(64, MINIVLLM_R32, "%32, %33, %34, %35", 36, 37, 38, MINIVLLM_F32(0))
MINIVLLM_WGMMA(128, MINIVLLM_R64, "%64, %65, %66, %67", 68, 69, 70, MINIVLLM_F32(0),
               MINIVLLM_F32(32))
#undef MINIVLLM_R32
#undef MINIVLLM_R64
#undef MINIVLLM_F4
#undef MINIVLLM_F16
#undef MINIVLLM_F32
#undef MINIVLLM_WGMMA_TYPED
#undef MINIVLLM_WGMMA

}  // namespace minivllm::cuda::attention
