// What the matrix products for every card share: the way into shared memory, places in it, the
// order of tiles, and the way from float sums to the output. See gemm_simt.cu and gemm_mma.cu.
#pragma once

#include <algorithm>

#include "common.cuh"
#include "sm80.cuh"

namespace minivllm::cuda::plain {

constexpr int kVecBytes = 16;
constexpr int kLineVecs = 8;  // 16-byte vectors in a line of the 32 banks

using sm80::commit_copies;
using sm80::copy_async;
using sm80::wait_copies;

// Rows of kRowVecs vectors exchange them within a line so that 8 rows' vectors of the same column
// are in 8 different places of it: a vector's column in its row's place is column ^ swizzle(row).
template <int kRowVecs>
__host__ __device__ constexpr int swizzle(int row) {
  static_assert(kRowVecs <= kLineVecs && kLineVecs % kRowVecs == 0);
  return row / (kLineVecs / kRowVecs) % kRowVecs;
}

// A matrix's rows from some row on, of which the tile has the first `rows`.
template <typename T>
struct Rows {
  const T* first;
  int64_t stride;
  int rows;
  int end;  // of K: what lies behind counts as 0
};

// kThreads threads bring the elements [k, k + kStep) of kRows rows to a place of kRows x kStep.
// Where rows do not begin at 16 bytes (kVec is false) a vector is put together from its elements.
template <int kRows, int kStep, int kThreads, bool kVec, typename T>
__device__ __forceinline__ void copy_rows(uint32_t to, const Rows<T>& from, int k, int thread) {
  constexpr int kVecElements = kVecBytes / sizeof(T), kRowVecs = kStep / kVecElements;
  constexpr int kVecs = kRows * kRowVecs;
#pragma unroll 4  // not all of many: addresses take registers
  for (int i = 0; i < (kVecs + kThreads - 1) / kThreads; ++i) {
    const int index = i * kThreads + thread;
    if (kVecs % kThreads != 0 && index >= kVecs) break;
    const int row = index / kRowVecs, vec = index % kRowVecs;
    const int at = k + vec * kVecElements;
    const uint32_t place = to + (row * kRowVecs + (vec ^ swizzle<kRowVecs>(row))) * kVecBytes;
    const T* source = from.first + row * from.stride + at;
    const bool inside = row < from.rows;
    if constexpr (kVec) {
      copy_async<kVecBytes>(place, source, inside && at < from.end);
    } else if constexpr (sizeof(T) == 4) {
#pragma unroll
      for (int e = 0; e < kVecElements; ++e)
        copy_async<4>(place + 4 * e, source + e, inside && at + e < from.end);
    } else {
      const auto element = [&](int e) -> uint32_t {
        return inside && at + e < from.end ? reinterpret_cast<const uint16_t*>(source)[e] : 0;
      };
      uint32_t word[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) word[w] = element(2 * w) | element(2 * w + 1) << 16;
      asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(place), "r"(word[0]), "r"(word[1]),
                   "r"(word[2]), "r"(word[3])
                   : "memory");
    }
  }
}

struct Output {
  void* out;         // [num_tokens, n], rows stride apart; n / 2 columns for kSiluMul
  const void* bias;  // [n]; may be null
  int64_t stride;
  int num_tokens, n;
  Epilogue epilogue;
  bool is_float;  // out is float32, else T
  bool pairs;     // two elements of T can be read and written at once at every even column
};

inline Output output_of(const LinearParams& p, size_t element_bytes) {
  const bool pairs = reinterpret_cast<uintptr_t>(p.out) % (2 * element_bytes) == 0 &&
                     p.out_stride % 2 == 0 && p.n % 2 == 0;
  return {p.out,
          p.bias,
          p.out_stride,
          static_cast<int>(p.num_tokens),
          static_cast<int>(p.n),
          p.epilogue,
          p.out_dtype == DType::kFloat32,
          pairs};
}

// The sums of an even column and the one after it, which may be outside: bias, residual or SiLU in
// float, one rounding.
template <typename T>
__device__ __forceinline__ void store_pair(const Output& o, int token, int column, float low,
                                           float high) {
  if (token >= o.num_tokens || column >= o.n) return;
  const bool both = column + 1 < o.n;
  if (o.bias != nullptr) {
    const T* bias = static_cast<const T*>(o.bias) + column;
    low += to_float(bias[0]);
    if (both) high += to_float(bias[1]);
  }
  const int64_t row = token * o.stride;
  T* out = static_cast<T*>(o.out) + row + column;
  if (o.epilogue == Epilogue::kSiluMul) {
    const float product = __fdividef(low, 1.0f + __expf(-low)) * high;
    static_cast<T*>(o.out)[row + column / 2] = from_float<T>(product);
  } else if (o.is_float && sizeof(T) != sizeof(float)) {
    float* wide = static_cast<float*>(o.out) + row + column;
    wide[0] = low;
    if (both) wide[1] = high;
  } else if (o.pairs) {
    auto* pair = reinterpret_cast<Vec<T, 2>*>(out);
    Vec<T, 2> old = {};
    if (o.epilogue == Epilogue::kResidual) {
      old = *pair;
      low += to_float(old.data[0]);
      high += to_float(old.data[1]);
    }
    *pair = {{from_float<T>(low), from_float<T>(high)}};
  } else {
    const bool residual = o.epilogue == Epilogue::kResidual;
    out[0] = from_float<T>(residual ? to_float(out[0]) + low : low);
    if (both) out[1] = from_float<T>(residual ? to_float(out[1]) + high : high);
  }
}

// Tiles in an order in which those that run at once share tokens and weights in L2.
struct Tiles {
  int tokens, columns;  // how many

  __device__ int2 at(int index) const {  // x: of tokens, y: of columns
    constexpr int kGroup = 16;
    const int in_group = kGroup * columns;
    const int first = index / in_group * kGroup;
    const int width = min(kGroup, tokens - first);
    index %= in_group;
    return {first + index % width, index / width};
  }
};

inline int ceil_div(int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); }

inline int64_t tiles_of(const LinearParams& p, int tokens, int columns) {
  return int64_t{ceil_div(p.num_tokens, tokens)} * ceil_div(p.n, columns);
}

// Do the rows of x and of the weight begin at 16 bytes?
inline bool aligned(const LinearParams& p, size_t element_bytes) {
  const auto addresses = reinterpret_cast<uintptr_t>(p.x) | reinterpret_cast<uintptr_t>(p.weight);
  const int64_t vec_elements = kVecBytes / static_cast<int64_t>(element_bytes);
  return addresses % kVecBytes == 0 && p.k % vec_elements == 0 && p.x_stride % vec_elements == 0;
}

}  // namespace minivllm::cuda::plain
