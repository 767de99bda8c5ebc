// Hopper's own instructions, one thin wrapper each: mbarriers, clusters, bulk tensor copies (TMA);
// the matrix products are in wgmma.cuh. Names and operand rules: PTX ISA, sections "mbarrier",
// "barrier.cluster", "st.async", "cp.async.bulk.tensor".
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

__device__ __forceinline__ void load_shared(float (&v)[4], uint32_t address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(address)
               : "memory");
}
__device__ __forceinline__ void load_shared(float2& v, uint32_t address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, const float* v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v[0]), "f"(v[1]),
               "f"(v[2]), "f"(v[3])
               : "memory");
}
__device__ __forceinline__ void store_shared(uint32_t address, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
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

// All threads of all CTAs of the cluster arrive, and wait where they need to know it. This orders
// no memory: initialised mbarriers have a fence of their own, and a release at cluster scope costs
// a fence of the whole card.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_barrier() {
  cluster_arrive();
  cluster_wait();
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
// Stores two or four floats to another CTA's shared memory; its barrier counts their bytes. For
// clusters of two CTAs or more: in a single one it is an illegal instruction.
__device__ __forceinline__ void store_remote(uint32_t mapped, float2 values,
                                             uint32_t mapped_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(
          mapped),
      "f"(values.x), "f"(values.y), "r"(mapped_barrier)
      : "memory");
}
__device__ __forceinline__ void store_remote(uint32_t mapped, const float* values,
                                             uint32_t mapped_barrier) {
  asm volatile(
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(mapped),
      "f"(values[0]), "f"(values[1]), "f"(values[2]), "f"(values[3]), "r"(mapped_barrier)
      : "memory");
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

// Copies a box from shared memory to (c0, c1, c2), as far as that lies inside the matrices.
__device__ __forceinline__ void tma_store(const CUtensorMap* map, uint32_t source, int c0, int c1,
                                          int c2) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];" ::"l"(map),
      "r"(source), "r"(c0), "r"(c1), "r"(c2)
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

// This thread's warp in the block, shuffled so that the compiler knows it to be the same in a warp.
// Inside a branch on it addresses may then stay in uniform registers, where wgmma's descriptors are
// wanted.
__device__ __forceinline__ int warp_index() {
  return __shfl_sync(kFullMask, static_cast<int>(threadIdx.x) / kWarpSize, 0);
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

// Row-major matrices [count, rows, columns], one behind the other, copied in boxes of box_rows rows
// of 128 bytes, swizzled. row_stride counts elements; rows start at multiples of 16 bytes.
inline CUtensorMap matrices_map(const void* matrices, DType dtype, int64_t count, int64_t rows,
                                int64_t columns, int64_t row_stride, int box_rows) {
  const int element = dtype == DType::kFloat32 ? 4 : 2;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                               static_cast<cuuint64_t>(count)};
  const cuuint64_t strides[2] = {static_cast<cuuint64_t>(row_stride * element),
                                 static_cast<cuuint64_t>(rows * row_stride * element)};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(kSwizzleRow / element),
                             static_cast<cuuint32_t>(box_rows), 1};
  return encode_tensor_map(matrices, dtype, 3, sizes, strides, box);
}

}  // namespace minivllm::cuda::sm90
