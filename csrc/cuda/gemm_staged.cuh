// Wide tiles of the matrix product leave through shared memory: see gemm_epilogue.cuh.
#pragma once

#include <algorithm>

#include "gemm_copy.cuh"
#include "gemm_fused.cuh"
#include "sm80.cuh"

namespace minivllm::cuda::gemm {

// Chunk buffers of a warpgroup: one is filled while the other leaves, or all are filled at once
// where there is room.
template <typename S>
constexpr int kChunkBuffers = S::kSums ? std::max(2, S::kN / 64) : 2;
// A warpgroup's shared memory: these, and before them, in the same place, what is parked.
template <typename S>
constexpr int kExitBytes =
    std::max(kChunkBuffers<S> * kChunkBytes,
             S::kParked* sm90::kWarpgroupSize* static_cast<int>(sizeof(float)));

// Transposes the 4 x 4 halves that 4 neighbouring lanes hold: lane q gives words (0, 1), (2, 3) and
// gets element q of lanes (0, 1), (2, 3).
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

// A warpgroup's way out: its chunk buffers and the output's map.
struct Exit {
  const CUtensorMap* map;  // boxes of [64 rows, 128 bytes]
  uint32_t buffers;        // shared address of the warpgroup's
  int warpgroup;
  int matrix = 0;  // of the map's

  // Waits until all copies have been read, for all threads of the warpgroup.
  __device__ void drain(int thread) {
    if (thread == 0) sm90::bulk_wait_read<0>();
    sm90::warpgroup_barrier(warpgroup);
  }
  // Sends kChunks chunks, the first at column and further ones kWidth columns on; fill(buffer, i)
  // makes one. Called by all threads of the warpgroup.
  template <int kChunks, int kBuffers, int kWidth, typename Fill>
  __device__ __forceinline__ void send(int thread, int token, int column, Fill&& fill) {
    constexpr int kAtOnce = kChunks <= kBuffers ? kChunks : 1;
#pragma unroll
    for (int first = 0; first < kChunks; first += kAtOnce) {
      if (first == 0) {
        drain(thread);
      } else {
        if (thread == 0) sm90::bulk_wait_read<kBuffers - 1>();
        sm90::warpgroup_barrier(warpgroup);
      }
      const uint32_t buffer = buffers + first % kBuffers * kChunkBytes;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) fill(buffer + i * kChunkBytes, first + i);
      sm90::async_proxy_fence();
      sm90::warpgroup_barrier(warpgroup);
      if (thread != 0) continue;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        sm90::tma_store(map, buffer + i * kChunkBytes, column + (first + i) * kWidth, token,
                        matrix);
      sm90::bulk_commit();
    }
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

// Where a lane's part of two 8 x 8 matrices of rows by two of columns is, as ldmatrix and stmatrix
// want it: those of columns 8 * i and the 8 after them, of a chunk of 64 columns.
__device__ __forceinline__ uint32_t matrices_address(uint32_t chunk, const Place& at, int i) {
  const int matrix = at.lane / 8, piece = i + matrix / 2;
  const int row = 16 * at.warp + 8 * (matrix % 2) + at.lane % 8;
  return chunk + row * sm90::kSwizzleRow + ((piece ^ row % 8) * 16);
}

__device__ __forceinline__ void put_matrices(uint32_t address, const uint32_t (&v)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
               "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3])
               : "memory");
}
// One chunk of 64 columns of T from the 32 accumulators at y.
template <typename T>
__device__ __forceinline__ void fill_chunk(uint32_t buffer, const float* y, const Place& at) {
#pragma unroll
  for (int i = 0; i < 8; i += 2) {
    const float* v = y + 4 * i;
    const uint32_t pairs[4] = {pack(v[0], v[1], T{}), pack(v[2], v[3], T{}), pack(v[4], v[5], T{}),
                               pack(v[6], v[7], T{})};
    put_matrices(matrices_address(buffer, at, i), pairs);
  }
}

// Adds the residual of a warpgroup's rows, which came through the ring as chunks of 64 columns.
template <typename T, int kN>
__device__ __forceinline__ void add_residual(float (&acc)[kN / 2], uint32_t chunks,
                                             const Place& at) {
#pragma unroll
  for (int chunk = 0; chunk < kN / 64; ++chunk) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      uint32_t old[4];
      sm80::load_matrices(old, matrices_address(chunks + chunk * kChunkBytes, at, i));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = unpack(old[j], T{});
        acc[32 * chunk + 4 * i + 2 * j] += pair.x;
        acc[32 * chunk + 4 * i + 2 * j + 1] += pair.y;
      }
    }
  }
}

// A tile of T.
template <typename T, typename S>
__device__ __forceinline__ void store_rounded(const float (&acc)[S::kN / 2], Exit& exit,
                                              const Place& at) {
  exit.send<S::kN / 64, kChunkBuffers<S>, 64>(
      kWarpSize * at.warp + at.lane, at.token, at.column,
      [&](uint32_t buffer, int chunk) { fill_chunk<T>(buffer, acc + 32 * chunk, at); });
}

template <typename T, typename S>
__device__ __forceinline__ void store_staged(float (&acc)[S::kN / 2], Exit& exit, const Output& o,
                                             const Place& at) {
  constexpr int kN = S::kN, kBuffers = kChunkBuffers<S>;
  const int thread = kWarpSize * at.warp + at.lane;
  if (o.is_float) {
    exit.send<kN / 32, kBuffers, 32>(thread, at.token, at.column, [&](uint32_t buffer, int chunk) {
#pragma unroll
      for (int part = 0; part < 8; ++part) {
        const float* pair = acc + 16 * chunk + 4 * (part / 2) + 2 * (part % 2);
        put_eight(buffer, at, part % 2, part / 2, __float_as_uint(pair[0]),
                  __float_as_uint(pair[1]));
      }
    });
  } else if (o.epilogue == Epilogue::kSiluMul) {
    exit.send<kN / 128, kBuffers, 64>(
        thread, at.token, at.column / 2, [&](uint32_t buffer, int chunk) {
#pragma unroll
          for (int part = 0; part < 8; ++part) {
            const float* y = acc + 64 * chunk + 16 * (part / 2) + 2 * (part % 2);
            const uint2 four = transpose_quad_halves(
                pack(silu_mul(y[0], y[1]), silu_mul(y[4], y[5]), T{}),
                pack(silu_mul(y[8], y[9]), silu_mul(y[12], y[13]), T{}), at.lane);
            put_eight(buffer, at, part % 2, part / 2, four.x, four.y);
          }
        });
  } else {
    store_rounded<T, S>(acc, exit, at);
  }
}

// Of a chunk of the new residual in shared memory: times the norm's weights, in its place, and its
// square sums, as store_weighed.
template <typename T>
__device__ __forceinline__ void weigh_chunk(uint32_t chunk, const Output& o, const Place& at) {
  uint32_t weights[kGroupPairs];
  load_weights<T>(weights, o, at);
  float squares[2][kGroupPairs];
#pragma unroll
  for (int i = 0; i < kGroupPairs; i += 2) {
    const uint32_t address = matrices_address(chunk, at, i);
    uint32_t pairs[4];  // of both rows, then of the next 8 columns
    sm80::load_matrices(pairs, address);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 v = unpack(pairs[j], T{}), w = unpack(weights[i + j / 2], T{});
      squares[j % 2][i + j / 2] = split_norm::pair_square(v.x, v.y);
      pairs[j] = pack(__fmul_rn(v.x, w.x), __fmul_rn(v.y, w.y), T{});
    }
    put_matrices(address, pairs);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int64_t token = at.token + at.row() + 8 * h;
    const float sum = split_norm::quad_sum(split_norm::add_pairs(squares[h]));
    if (token < o.num_tokens && at.lane % 4 == 0)
      o.new_square_sums[token * (o.n / kGroup) + at.column / kGroup] = sum;
  }
}

// The new residual and its weighed rows.
template <typename T, typename S>
__device__ __forceinline__ void store_staged_weighed(const float (&acc)[S::kN / 2], Exit& exit,
                                                     const Problem& p, const Place& at) {
  constexpr int kChunks = S::kN / kGroup;
  static_assert(kChunks <= kChunkBuffers<S>);
  const int thread = kWarpSize * at.warp + at.lane;
  store_rounded<T, S>(acc, exit, at);
  exit.drain(thread);
  const int chunks = min(kChunks, (p.output.n - at.column) / kGroup);
#pragma unroll 1
  for (int i = 0; i < chunks; ++i) {
    Place place = at;
    place.column += i * kGroup;
    weigh_chunk<T>(exit.buffers + i * kChunkBytes, p.output, place);
  }
  sm90::async_proxy_fence();
  sm90::warpgroup_barrier(exit.warpgroup);
  if (thread != 0) return;
  for (int i = 0; i < chunks; ++i)
    sm90::tma_store(&p.weighted, exit.buffers + i * kChunkBytes, at.column + i * kGroup, at.token,
                    0);
  sm90::bulk_commit();
}

}  // namespace minivllm::cuda::gemm
