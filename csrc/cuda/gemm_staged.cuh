// Wide tiles of the matrix product leave through shared memory: see gemm_epilogue.cuh.
#pragma once

#include <algorithm>

#include "gemm_epilogue.cuh"

namespace minivllm::cuda::gemm {

constexpr int kChunkRows = 64;  // a warpgroup's
constexpr int kChunkBytes = kChunkRows * sm90::kSwizzleRow;
constexpr int kChunkBuffers = 2;  // a warpgroup: one is filled while the other leaves

// A warpgroup's shared memory: chunk buffers, and before them, in the same place, what is parked.
template <typename S>
constexpr int kExitBytes = std::max(
    kChunkBuffers * kChunkBytes, S::kParked* sm90::kWarpgroupSize* static_cast<int>(sizeof(float)));

// Transposes the 4 x 4 words that 4 neighbouring lanes hold, one row a lane.
__device__ __forceinline__ void transpose_quad(uint32_t (&v)[4], int lane) {
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t other = __shfl_xor_sync(kFullMask, odd ? v[i] : v[i + 1], 1);
    (odd ? v[i] : v[i + 1]) = other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t other = __shfl_xor_sync(kFullMask, upper ? v[i] : v[i + 2], 2);
    (upper ? v[i] : v[i + 2]) = other;
  }
}

// The same for 4 x 4 halves: lane q gives words (0, 1), (2, 3) and gets element q of lanes (0, 1),
// (2, 3).
__device__ __forceinline__ uint2 transpose_quad_halves(uint32_t first, uint32_t second, int lane) {
  const bool odd = lane & 1, upper = lane & 2;
  const uint32_t kept = upper ? second : first;
  const uint32_t received = __shfl_xor_sync(kFullMask, upper ? first : second, 2);
  const uint32_t low_lane = upper ? received : kept, high_lane = upper ? kept : received;
  constexpr unsigned kLowHalves = 0x5410, kHighHalves = 0x7632;
  const uint32_t mine = __byte_perm(low_lane, high_lane, odd ? kHighHalves : kLowHalves);
  const uint32_t theirs = __shfl_xor_sync(
      kFullMask, __byte_perm(low_lane, high_lane, odd ? kLowHalves : kHighHalves), 1);
  const uint32_t left = odd ? theirs : mine, right = odd ? mine : theirs;
  return {__byte_perm(left, right, kLowHalves), __byte_perm(left, right, kHighHalves)};
}

// A warpgroup's way out: two chunk buffers and the output's map.
struct Exit {
  const CUtensorMap* map;  // boxes of [64 rows, 128 bytes]
  uint32_t buffers;        // shared address of the warpgroup's two
  int warpgroup;
  int matrix = 0;  // of the map's
  int next = 0;    // buffer

  // Waits until all copies have been read, for all threads of the warpgroup.
  __device__ void drain(int thread) {
    if (thread == 0) sm90::bulk_wait_read<0>();
    sm90::warpgroup_barrier(warpgroup);
  }
  // A buffer whose last copy has been read, for all threads of the warpgroup.
  __device__ uint32_t acquire(int thread) {
    if (thread == 0) sm90::bulk_wait_read<kChunkBuffers - 1>();
    sm90::warpgroup_barrier(warpgroup);
    return buffers + next * kChunkBytes;
  }
  __device__ void send(int thread, int token, int column) {
    sm90::async_proxy_fence();
    sm90::warpgroup_barrier(warpgroup);
    if (thread == 0) {
      sm90::tma_store(map, buffers + next * kChunkBytes, column, token, matrix);
      sm90::bulk_commit();
    }
    next ^= 1;
  }
};

// Eight bytes at byte 32 * index + 8 * (lane % 4) of a chunk's row, swizzled.
__device__ __forceinline__ void put_eight(uint32_t buffer, const Place& at, int h, int index,
                                          uint32_t x, uint32_t y) {
  const int row = at.row() + 8 * h, piece = 2 * index + at.lane % 4 / 2;
  const uint32_t address =
      buffer + row * sm90::kSwizzleRow + ((piece ^ row % 8) * 16) + at.lane % 2 * 8;
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(address), "r"(x), "r"(y) : "memory");
}

// The residual of one chunk of 64 columns: 16 bytes a lane of one of 4 neighbouring 8 columns.
template <typename T>
__device__ __forceinline__ void load_chunk(uint4 (&old)[4], const Output& o, const Place& at,
                                           int chunk) {
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    const int token = at.token + at.row() + 8 * (part % 2);
    const int column = at.column + 64 * chunk + 32 * (part / 2) + 8 * (at.lane % 4);
    old[part] = make_uint4(0, 0, 0, 0);
    if (token < o.num_tokens && column < o.n)
      old[part] =
          *reinterpret_cast<const uint4*>(static_cast<const T*>(o.out) + token * o.stride + column);
  }
}

// One chunk of 64 columns of T from the 32 accumulators at y.
template <typename T>
__device__ __forceinline__ void fill_chunk(uint32_t buffer, const float* y, const Place& at) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {  // two 8 x 8 matrices of rows by two of columns
    const int matrix = at.lane / 8, piece = i + matrix / 2;
    const int row = 16 * at.warp + 8 * (matrix % 2) + at.lane % 8;
    const uint32_t address = buffer + row * sm90::kSwizzleRow + ((piece ^ row % 8) * 16);
    const float* v = y + 4 * i;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(pack(v[0], v[1], T{})), "r"(pack(v[2], v[3], T{})), "r"(pack(v[4], v[5], T{})),
                 "r"(pack(v[6], v[7], T{}))
                 : "memory");
  }
}

// Adds a chunk of the residual to the 32 accumulators at y.
template <typename T>
__device__ __forceinline__ void add_chunk(float* y, const uint4 (&old)[4], const Place& at) {
#pragma unroll
  for (int part = 0; part < 4; ++part) {
    uint32_t v[4] = {old[part].x, old[part].y, old[part].z, old[part].w};
    transpose_quad(v, at.lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 r = unpack(v[i], T{});
      float* pair = y + 16 * (part / 2) + 4 * i + 2 * (part % 2);
      pair[0] += r.x;
      pair[1] += r.y;
    }
  }
}

// Two chunks of the residual travel ahead of the accumulators that they are added to.
struct Ahead {
  uint4 old[2][4];
};

template <typename T, int kN>
__device__ __forceinline__ void store_staged(float (&acc)[kN / 2], Ahead& ahead, Exit& exit,
                                             const Output& o, const Place& at) {
  const int thread = kWarpSize * at.warp + at.lane;
  if (o.is_float) {
#pragma unroll
    for (int chunk = 0; chunk < kN / 32; ++chunk) {
      const uint32_t buffer = exit.acquire(thread);
#pragma unroll
      for (int part = 0; part < 8; ++part) {
        const float* pair = acc + 16 * chunk + 4 * (part / 2) + 2 * (part % 2);
        put_eight(buffer, at, part % 2, part / 2, __float_as_uint(pair[0]),
                  __float_as_uint(pair[1]));
      }
      exit.send(thread, at.token, at.column + 32 * chunk);
    }
  } else if (o.epilogue == Epilogue::kSiluMul) {
#pragma unroll
    for (int chunk = 0; chunk < kN / 128; ++chunk) {
      const uint32_t buffer = exit.acquire(thread);
#pragma unroll
      for (int part = 0; part < 8; ++part) {
        const float* y = acc + 64 * chunk + 16 * (part / 2) + 2 * (part % 2);
        const uint2 four =
            transpose_quad_halves(pack(silu_mul(y[0], y[1]), silu_mul(y[4], y[5]), T{}),
                                  pack(silu_mul(y[8], y[9]), silu_mul(y[12], y[13]), T{}), at.lane);
        put_eight(buffer, at, part % 2, part / 2, four.x, four.y);
      }
      exit.send(thread, at.token, at.column / 2 + 64 * chunk);
    }
  } else {
    const bool residual = o.epilogue == Epilogue::kResidual;
#pragma unroll
    for (int chunk = 0; chunk < kN / 64; ++chunk) {
      if (residual) {
        add_chunk<T>(acc + 32 * chunk, ahead.old[chunk % 2], at);
        if (chunk + 2 < kN / 64) load_chunk<T>(ahead.old[chunk % 2], o, at, chunk + 2);
      }
      const uint32_t buffer = exit.acquire(thread);
      fill_chunk<T>(buffer, acc + 32 * chunk, at);
      exit.send(thread, at.token, at.column + 64 * chunk);
    }
  }
}

}  // namespace minivllm::cuda::gemm
