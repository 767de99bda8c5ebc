// Hopper's own instructions, one thin wrapper each: mbarriers, bulk tensor copies (TMA) and
// warpgroup matrix products (wgmma). Names and operand rules: PTX ISA, sections "mbarrier",
// "cp.async.bulk.tensor", "Asynchronous warpgroup level matrix instructions".
//
// Device functions are for kernels whose body is compiled for sm_90a only (guard the body with
// MINIVLLM_SM90A); a function that nothing calls emits no code, so other targets may include this.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <type_traits>

#include "common.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define MINIVLLM_SM90A 1
#endif

namespace minivllm::cuda::sm90 {

// Threads that issue a wgmma together: four warps, the first a multiple of four.
constexpr int kWarpgroupSize = 128;
// A 128-byte swizzle permutes 16-byte pieces inside 8 rows of 128 bytes; such a tile starts at a
// multiple of this.
constexpr int kSwizzleAtom = 1024;
constexpr int kSwizzleRow = 128;

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Moves registers between the warpgroups of a CTA: all four warps of one call it, at the head of
// their branch. A multiple of 8.
template <int kRegisters>
__device__ __forceinline__ void shrink_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ __forceinline__ void grow_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// ---- mbarriers, by shared address -----------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the copy engine. Then a __syncthreads for the other threads.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// Arrives and announces bytes that copies will bring. Rows that a copy fills with zeros count.
__device__ __forceinline__ void mbarrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Waits for the end of the phase of this parity. The loop stays inside one asm block so that the
// compiler keeps what surrounds it, wgmma descriptors above all, in uniform registers.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- clusters -------------------------------------------------------------------------------

// All threads of all CTAs of the cluster; what they wrote to shared memory before can be seen
// after.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// A shared address of this CTA as that of the same thing in another CTA of the cluster.
__device__ __forceinline__ uint32_t map_to_rank(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
// Arrives at another CTA's barrier. Without a scope on purpose: a release at cluster scope costs a
// fence of the whole card, and what is handed back here was only read.
__device__ __forceinline__ void mbarrier_arrive_remote(uint32_t mapped_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(mapped_barrier) : "memory");
}

// ---- bulk tensor copies ---------------------------------------------------------------------

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_last_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void prefetch_tensor_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies the box at (c0, c1, c2), innermost first, to shared memory; bytes are counted by barrier.
__device__ __forceinline__ void tma_load(uint32_t destination, const CUtensorMap* map,
                                         uint32_t barrier, int c0, int c1, int c2,
                                         uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "l"(policy)
      : "memory");
}

// The same to the same place in every CTA of the cluster whose rank's bit is set in ranks; counted
// by each one's own barrier.
__device__ __forceinline__ void tma_load_multicast(uint32_t destination, const CUtensorMap* map,
                                                   uint32_t barrier, int c0, int c1, int c2,
                                                   uint16_t ranks, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster.L2::cache_hint [%0], [%1, {%3, %4, %5}], [%2], %6, %7;" ::"r"(
          destination),
      "l"(map), "r"(barrier), "r"(c0), "r"(c1), "r"(c2), "h"(ranks), "l"(policy)
      : "memory");
}

// Copies a box from shared memory to (c0, c1), as far as that lies inside the matrix.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source, int c0, int c1) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(map),
      "r"(source), "r"(c0), "r"(c1)
      : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until at most kPending of this thread's committed groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}
// Makes this thread's shared stores visible to the copy engine and wgmma. Then a barrier.
__device__ __forceinline__ void async_proxy_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A barrier among the 128 threads of a warpgroup.
__device__ __forceinline__ void warpgroup_barrier(int warpgroup) {
  asm volatile("bar.sync %0, %1;" ::"r"(warpgroup + 1), "n"(kWarpgroupSize) : "memory");
}

// Describes a tensor to the copy engine: sizes and box in elements, strides (of all dimensions but
// the innermost) in bytes, the 128-byte swizzle in shared memory.
inline CUtensorMap encode_tensor_map(const void* tensor, DType dtype, int dimensions,
                                     const cuuint64_t* sizes, const cuuint64_t* strides,
                                     const cuuint32_t* box) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    constexpr unsigned kCudaVersion = 12000;  // the first with this signature
    MINIVLLM_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                    kCudaVersion, cudaEnableDefault, &found));
    if (found != cudaDriverEntryPointSuccess)
      throw std::runtime_error("the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  const CUtensorMapDataType type = dtype == DType::kFloat32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
                                   : dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                                               : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint32_t element_strides[5] = {1, 1, 1, 1, 1};
  CUtensorMap map;
  const CUresult result = encode(
      &map, type, static_cast<cuuint32_t>(dimensions), const_cast<void*>(tensor), sizes, strides,
      box, element_strides, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS)
    throw std::runtime_error("cuTensorMapEncodeTiled failed with " + std::to_string(result));
  return map;
}

// A view [k / 64][rows][64] of a row-major matrix [rows, k] of 2-byte elements, copied in boxes of
// [box_blocks][box_rows][64] with the 128-byte swizzle: what wgmma reads as K-major tiles of 64.
// Elements outside the matrix read as zero. row_stride counts elements, a multiple of 8.
inline CUtensorMap k_block_map(const void* matrix, DType dtype, int64_t rows, int64_t k,
                               int64_t row_stride, int box_rows, int box_blocks) {
  constexpr int kBlock = kSwizzleRow / 2;
  const cuuint64_t sizes[3] = {kBlock, static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(k / kBlock)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_stride) * 2, kSwizzleRow};
  const cuuint32_t box[3] = {kBlock, static_cast<cuuint32_t>(box_rows),
                             static_cast<cuuint32_t>(box_blocks)};
  return encode_tensor_map(matrix, dtype, 3, sizes, strides, box);
}

// A row-major matrix [rows, columns], copied in boxes of box_rows rows of 128 bytes, swizzled.
// row_stride counts elements; rows start at multiples of 16 bytes.
inline CUtensorMap matrix_map(const void* matrix, DType dtype, int64_t rows, int64_t columns,
                              int64_t row_stride, int box_rows) {
  const int element = dtype == DType::kFloat32 ? 4 : 2;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_stride * element)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(kSwizzleRow / element),
                             static_cast<cuuint32_t>(box_rows)};
  return encode_tensor_map(matrix, dtype, 2, sizes, strides, box);
}

// ---- warpgroup matrix products --------------------------------------------------------------

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
