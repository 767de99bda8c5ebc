// From wgmma's float accumulators to the output: bias, residual or SiLU in float, one rounding.
//
// Tiles of one warpgroup, or of few columns, are stored from the registers that hold them. Wide
// tiles of two warpgroups go through shared memory in chunks of 128 bytes a row and leave by bulk
// copies, which clip at the matrix' edges and run while the next tile is multiplied.
#pragma once

#include <type_traits>

#include "common.cuh"
#include "sm90.cuh"
#include "split_norm.cuh"

namespace minivllm::cuda::gemm {

// LinearParams' names and meanings.
struct Output {
  void* out;
  const void* bias;
  int64_t stride;
  int num_tokens, n;
  Epilogue epilogue;
  bool is_float;  // out is float32, else T
  int num_square_sums;
  const float* square_sums;
  float eps;
  const void* norm_weight;
  void* weighted;
  float* new_square_sums;
  RopeKvTo rope;
  LeadersTo leaders;
};

// Where a thread's accumulators belong. It holds two rows, 8 apart, and of every 8 columns the pair
// 2 * (lane % 4).
struct Place {
  int token;   // first of the warpgroup's 64
  int column;  // first of the tile
  int warp;    // of the warpgroup
  int lane;

  __device__ int row() const { return 16 * warp + lane / 4; }  // in the warpgroup
};

__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ float2 unpack(uint32_t pair, __nv_bfloat16) {
  return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(pair));
}
__device__ __forceinline__ float2 unpack(uint32_t pair, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(pair));
}

__device__ __forceinline__ float silu_mul(float gate, float up) {
  return __fdividef(gate, 1.0f + __expf(-gate)) * up;
}

// The second half of an RMSNorm: see kNormColumns. sums[h] are those of row 8 h.
__device__ __forceinline__ void load_square_sums(split_norm::RowSums (&sums)[2], const Output& o,
                                                 const Place& at) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = at.token + at.row() + 8 * h;
    sums[h] = split_norm::RowSums(o.square_sums + static_cast<int64_t>(token) * o.num_square_sums,
                                  token < o.num_tokens ? o.num_square_sums : 0, at.lane);
  }
}
__device__ __forceinline__ void find_scales(float (&scale)[2], const split_norm::RowSums (&sums)[2],
                                            const Output& o, int lane) {
#pragma unroll
  for (int h = 0; h < 2; ++h) scale[h] = sums[h].scale(o.num_square_sums, o.eps, lane);
}
template <int kN>
__device__ __forceinline__ void scale_rows(float (&acc)[kN / 2], const float (&scale)[2]) {
#pragma unroll
  for (int i = 0; i < kN / 2; ++i) acc[i] = __fmul_rn(acc[i], scale[i / 2 % 2]);
}

template <typename T, int kN>
__device__ __forceinline__ void add_bias(float (&acc)[kN / 2], const Output& o, const Place& at) {
  const T* bias = static_cast<const T*>(o.bias);
#pragma unroll
  for (int i = 0; i < kN / 8; ++i) {
    const int column = at.column + 8 * i + 2 * (at.lane % 4);
    uint32_t pair = 0;
    if (column < o.n) pair = *reinterpret_cast<const uint32_t*>(bias + column);
    const float2 b = unpack(pair, T{});
    acc[4 * i] += b.x;
    acc[4 * i + 1] += b.y;
    acc[4 * i + 2] += b.x;
    acc[4 * i + 3] += b.y;
  }
}

// ---- from registers -------------------------------------------------------------------------

// The residual's pairs, where the accumulators' will be: old[2 * i + h].
template <typename T, int kN>
__device__ __forceinline__ void load_pairs(uint32_t (&old)[kN / 4], const Output& o,
                                           const Place& at) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int token = at.token + at.row() + 8 * h;
    const T* row = static_cast<const T*>(o.out) + token * o.stride;
#pragma unroll
    for (int i = 0; i < kN / 8; ++i) {
      const int column = at.column + 8 * i + 2 * (at.lane % 4);
      old[2 * i + h] = 0;
      if (token < o.num_tokens && column < o.n)
        old[2 * i + h] = *reinterpret_cast<const uint32_t*>(row + column);
    }
  }
}

// Each kind of output is a loop of its own without branches: this code runs once a tile, from a
// cold instruction cache.
template <typename T, int kN>
__device__ __forceinline__ void store_pairs(const float (&acc)[kN / 2],
                                            const uint32_t (&old)[kN / 4], const Output& o,
                                            const Place& at) {
  const auto for_pairs = [&](auto* out, int shrink, auto&& make) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = at.token + at.row() + 8 * h;
      if (token >= o.num_tokens) break;
      auto* row = out + token * o.stride + (at.column + 2 * (at.lane % 4)) / shrink;
      const int columns = o.n - at.column - 2 * (at.lane % 4);  // this thread's and all further
#pragma unroll
      for (int i = 0; i < kN / 8; ++i) {
        const auto value = make(acc[4 * i + 2 * h], acc[4 * i + 2 * h + 1], old[2 * i + h]);
        using Value = std::remove_const_t<decltype(value)>;
        if (8 * i < columns) *reinterpret_cast<Value*>(row + 8 * i / shrink) = value;
      }
    }
  };
  T* out = static_cast<T*>(o.out);
  if (o.is_float) {
    for_pairs(static_cast<float*>(o.out), 1,
              [](float x, float y, uint32_t) { return make_float2(x, y); });
  } else if (o.epilogue == Epilogue::kSiluMul) {
    for_pairs(out, 2, [](float x, float y, uint32_t) { return from_float<T>(silu_mul(x, y)); });
  } else if (o.epilogue == Epilogue::kResidual) {
    for_pairs(out, 1, [](float x, float y, uint32_t residual) {
      const float2 r = unpack(residual, T{});
      return pack(r.x + x, r.y + y, T{});
    });
  } else {
    for_pairs(out, 1, [](float x, float y, uint32_t) { return pack(x, y, T{}); });
  }
}

}  // namespace minivllm::cuda::gemm
