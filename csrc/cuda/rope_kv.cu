// Rotates queries and keys by their positions and puts keys and values into their blocks:
//   out[i]        = x[i] cos - x[i + half] sin
//   out[i + half] = x[i + half] cos + x[i] sin        https://arxiv.org/abs/2104.09864
// in float, rounded once; where there is a q_norm or k_norm, after RMSNorm of the head.
//
// A group of lanes takes one head of one token, each lane the same chunk of both halves. Which lane
// adds what depends on head_dim alone. Offsets into the cache are 64 bits wide: a layer's cache may
// pass 2^31 elements. A position beyond the table, or one without a block, writes no key or value.
#include "partial_sums.cuh"
#include "rope.cuh"
#include "split_norm.cuh"

namespace minivllm::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kChunkBytes = 16;

template <typename T, int kChunk>
__device__ Vec<T, kChunk> load(const T* from, bool aligned) {
  if (aligned) return *reinterpret_cast<const Vec<T, kChunk>*>(from);
  Vec<T, kChunk> chunk;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) chunk.data[i] = from[i];
  return chunk;
}

template <typename T, int kChunk>
__device__ void store(T* to, const Vec<T, kChunk>& chunk, bool aligned) {
  if (aligned) {
    *reinterpret_cast<Vec<T, kChunk>*>(to) = chunk;
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk; ++i) to[i] = chunk.data[i];
}

// A chunk of a token's qkv from its own row, or from a product's partial sums, added in order and
// rounded as the product itself would.
template <typename T, int kChunk, bool kInParts>
__device__ Vec<T, kChunk> load_qkv(const RopeKvParams& p, int64_t token, int64_t column,
                                   bool aligned) {
  if constexpr (!kInParts) {
    return load<T, kChunk>(static_cast<const T*>(p.qkv) + token * p.qkv_stride + column, aligned);
  }
  constexpr int kPart = kChunk < 4 ? kChunk : 4;  // 16 bytes at a time
  const int64_t width = (p.num_q_heads + 2 * p.kv.num_kv_heads) * p.kv.head_dim;
  const float* from = p.partials + token * width + column;
  float sums[kChunk];
  add_parts(sums, p.num_partials, [&](float (&values)[kChunk], int64_t part) {
#pragma unroll
    for (int i = 0; i < kChunk; i += kPart) {
      const auto few = load<float, kPart>(from + part * p.num_tokens * width + i, aligned);
#pragma unroll
      for (int j = 0; j < kPart; ++j) values[i + j] = few.data[j];
    }
  });
  Vec<T, kChunk> chunk;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) chunk.data[i] = from_float<T>(sums[i]);
  return chunk;
}

// The pairs (first[j], second[j]), normalised and rotated in place. norm, which may be null, and
// the angles start at the chunk; norm of the second half lies half further.
template <typename T, int kChunk>
__device__ void rotate(Vec<T, kChunk>& first, Vec<T, kChunk>& second, float scale, const T* norm,
                       int half, const float* cosines, const float* sines, bool aligned) {
  constexpr int kAngles = kChunk < 4 ? kChunk : 4;  // 16 bytes of them at a time
  float low[kChunk];
  float high[kChunk];
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    low[j] = to_float(first.data[j]);
    high[j] = to_float(second.data[j]);
  }
  if (norm != nullptr) {
    const auto low_norm = load<T, kChunk>(norm, aligned);
    const auto high_norm = load<T, kChunk>(norm + half, aligned);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      low[j] = low[j] * scale * to_float(low_norm.data[j]);
      high[j] = high[j] * scale * to_float(high_norm.data[j]);
    }
  }
#pragma unroll
  for (int part = 0; part < kChunk; part += kAngles) {
    const auto c = load<float, kAngles>(cosines + part, aligned);
    const auto s = load<float, kAngles>(sines + part, aligned);
#pragma unroll
    for (int j = 0; j < kAngles; ++j) {
      rotate_pair(low[part + j], high[part + j], c.data[j], s.data[j]);
      first.data[part + j] = from_float<T>(low[part + j]);
      second.data[part + j] = from_float<T>(high[part + j]);
    }
  }
}

// Where a token's head of q, k or v goes, counted through all three; null: nowhere.
template <typename T>
__device__ T* destination(const RopeKvParams& p, int64_t token, int64_t head) {
  if (head < p.num_q_heads) {
    return static_cast<T*>(p.q_out) + (token * p.num_q_heads + head) * p.kv.head_dim;
  }
  const int64_t position = load_settled(p.positions + token);
  if (position >= p.max_position) return nullptr;
  // A block's values lie behind all of its keys, as further heads would.
  const int64_t offset =
      key_offset(p.kv, load_settled(p.slots + token), position, head - p.num_q_heads);
  return offset < 0 ? nullptr : static_cast<T*>(p.kv.cache) + offset;
}

// The head of a token that a group of 1 << lane_bits lanes takes. Lanes past the end stay for the
// shuffles, with the last head, and write nothing. In 32 bits: a division by 64 costs as much as
// all else here.
struct Unit {
  int64_t token, head;
  bool live;

  __device__ Unit(const RopeKvParams& p, int lane_bits) {
    const auto num_heads = static_cast<unsigned>(p.num_q_heads + 2 * p.kv.num_kv_heads);
    const unsigned unit = (blockIdx.x * kThreads + threadIdx.x) >> lane_bits;
    const unsigned row = unit / num_heads;
    live = row < p.num_tokens;
    token = live ? int64_t{row} : p.num_tokens - 1;
    head = live ? unit - row * num_heads : num_heads - 1;
  }
};

unsigned count_blocks(const RopeKvParams& p, int lane_bits) {
  const int64_t num_heads = p.num_q_heads + 2 * p.kv.num_kv_heads;
  const int64_t threads = (p.num_tokens * num_heads) << lane_bits;
  if (threads > (int64_t{1} << 32) - kThreads)
    throw std::invalid_argument("rope_kv: " + std::to_string(p.num_tokens) + " tokens at once");
  return static_cast<unsigned>((threads + kThreads - 1) / kThreads);
}

// 1 << lane_bits lanes, at most a warp, take a head. Parts are for few tokens and take registers;
// without them more rows are on their way at a time.
template <typename T, int kChunk, bool kInParts>
__global__ void __launch_bounds__(kThreads)
    rope_kv_kernel(RopeKvParams p, int lane_bits, bool aligned) {
  pdl_launch_dependents();
  const int64_t num_q = p.num_q_heads;
  const int64_t num_kv = p.kv.num_kv_heads;
  const int lanes = 1 << lane_bits;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const Unit unit(p, lane_bits);
  const int64_t token = unit.token, head = unit.head;

  const int half = static_cast<int>(p.kv.head_dim) / 2;
  const auto load_x = [&](int i) {
    return load_qkv<T, kChunk, kInParts>(p, token, head * p.kv.head_dim + i, aligned);
  };
  if (!p.settled) pdl_wait();
  T* const to = unit.live ? destination<T>(p, token, head) : nullptr;
  const int64_t position = load_settled(p.positions + token);
  const bool in_table = position >= 0 && position < p.max_position;
  pdl_wait();
  const int start = lane * kChunk;
  const int step = lanes * kChunk;
  Vec<T, kChunk> first = {};
  Vec<T, kChunk> second = {};
  if (start < half) {
    first = load_x(start);
    second = load_x(half + start);
  }
  const bool is_query = head < num_q;
  const bool is_value = head >= num_q + num_kv;

  const T* norm = static_cast<const T*>(is_value ? nullptr : is_query ? p.q_norm : p.k_norm);
  float scale = 1.0f;
  if (p.q_norm != nullptr || p.k_norm != nullptr) {  // the same for all lanes of a warp
    float sum = 0.0f;
    for (int i = start; i < half; i += step) {
      const auto a = load_x(i);
      const auto b = load_x(half + i);
#pragma unroll
      for (int j = 0; j < kChunk; ++j) {
        const float low = to_float(a.data[j]);
        const float high = to_float(b.data[j]);
        sum = fmaf(low, low, fmaf(high, high, sum));
      }
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kFullMask, sum, offset);
    }
    if (norm != nullptr) scale = rsqrtf(sum / static_cast<float>(2 * half) + p.eps);
  }
  if (to == nullptr) return;

  const float* cosines = p.cos_sin + (in_table ? position : 0) * p.kv.head_dim;
  const float* sines = cosines + half;
  for (int i = start; i < half; i += step) {
    if (i > start) {
      first = load_x(i);
      second = load_x(half + i);
    }
    if (!is_value) {
      rotate(first, second, scale, norm == nullptr ? nullptr : norm + i, half, cosines + i,
             sines + i, aligned);
    }
    store<T, kChunk>(to + i, first, aligned);
    store<T, kChunk>(to + half + i, second, aligned);
  }
}

template <typename T, int kChunk>
void launch_rope_kv(const RopeKvParams& p, bool aligned, Stream stream) {
  const int64_t chunks = p.kv.head_dim / 2 / kChunk;
  int lane_bits = 0;
  while (1 << lane_bits < chunks && 1 << lane_bits < kWarpSize) ++lane_bits;
  const auto kernel =
      p.partials == nullptr ? rope_kv_kernel<T, kChunk, false> : rope_kv_kernel<T, kChunk, true>;
  MINIVLLM_LAUNCH(kernel, dim3(count_blocks(p, lane_bits)), dim3(kThreads), 0, stream, p, lane_bits,
                  aligned);
}

// The same of a product's partial sums whose rows' RMSNorm is half done, for heads of 64: four
// lanes each.
constexpr int kQuadBits = 2;
static_assert(1 << kQuadBits == split_norm::kQuad);
template <typename T>
__global__ void __launch_bounds__(kThreads, 3) rope_sums_kernel(RopeKvParams p) {
  constexpr int kHeadDim = static_cast<int>(kNormColumns), kHalf = kHeadDim / 2;
  constexpr int kChunk = kHalf / split_norm::kQuad;
  using Floats = Vec<float, 4>;
  pdl_launch_dependents();
  const int64_t num_heads = p.num_q_heads + 2 * p.kv.num_kv_heads;
  const int lane = static_cast<int>(threadIdx.x) % split_norm::kQuad;
  const Unit unit(p, kQuadBits);
  const int64_t token = unit.token, head = unit.head;
  const int start = lane * kChunk;
  if (!p.settled) pdl_wait();
  T* const to = unit.live ? destination<T>(p, token, head) : nullptr;
  const int64_t position = load_settled(p.positions + token);
  const bool in_table = position >= 0 && position < p.max_position;
  const float* angles = p.cos_sin + (in_table ? position : 0) * kHeadDim + start;
  Floats cosines[2], sines[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    cosines[i] = reinterpret_cast<const Floats*>(angles)[i];
    sines[i] = reinterpret_cast<const Floats*>(angles + kHalf)[i];
  }
  pdl_wait();

  const float* from = p.partials + token * num_heads * kHeadDim + head * kHeadDim + start;
  const int64_t size = p.num_tokens * num_heads * kHeadDim;  // of a part
  float pairs[2 * kChunk];
  const int count = static_cast<int>(p.num_square_sums);
  const split_norm::RowSums square_sums(p.square_sums + token * count, count, lane);
  add_parts(pairs, p.num_partials, [&](float (&values)[2 * kChunk], int64_t part) {
#pragma unroll
    for (int i = 0; i < kChunk; i += 4) {
      load_four(values + i, from + part * size + i);
      load_four(values + kChunk + i, from + part * size + kHalf + i);
    }
  });
  const float scale = square_sums.scale(count, p.eps, lane);
  if (to == nullptr) return;
  const bool is_value = head >= p.num_q_heads + p.kv.num_kv_heads;
  Vec<T, kChunk> first, second;
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    float low = to_float(from_float<T>(__fmul_rn(pairs[i], scale)));
    float high = to_float(from_float<T>(__fmul_rn(pairs[kChunk + i], scale)));
    if (!is_value) rotate_pair(low, high, cosines[i / 4].data[i % 4], sines[i / 4].data[i % 4]);
    first.data[i] = from_float<T>(low);
    second.data[i] = from_float<T>(high);
  }
  store<T, kChunk>(to + start, first, true);
  store<T, kChunk>(to + kHalf + start, second, true);
}

void launch_rope_sums(const RopeKvParams& p, Stream stream) {
  const auto addresses =
      reinterpret_cast<uintptr_t>(p.q_out) | reinterpret_cast<uintptr_t>(p.kv.cache) |
      reinterpret_cast<uintptr_t>(p.cos_sin) | reinterpret_cast<uintptr_t>(p.partials);
  if (p.partials == nullptr || p.kv.head_dim != kNormColumns || p.dtype == DType::kFloat32 ||
      addresses % kChunkBytes != 0)
    throw std::invalid_argument("rope_kv: half an RMSNorm is for partial sums of heads of 64");
  const auto kernel =
      p.dtype == DType::kBFloat16 ? rope_sums_kernel<__nv_bfloat16> : rope_sums_kernel<__half>;
  MINIVLLM_LAUNCH(kernel, dim3(count_blocks(p, kQuadBits)), dim3(kThreads), 0, stream, p);
}

}  // namespace

void rope_kv(const RopeKvParams& p, Stream stream) {
  if (p.num_tokens == 0) return;
  if (p.kv.head_dim <= 0 || p.kv.head_dim % 2 != 0) {
    throw std::invalid_argument("rope_kv: head_dim " + std::to_string(p.kv.head_dim) +
                                " is not even");
  }
  if (p.square_sums != nullptr) return launch_rope_sums(p, stream);
  dispatch_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kChunk = kChunkBytes / sizeof(T);
    const auto addresses =
        reinterpret_cast<uintptr_t>(p.q_out) | reinterpret_cast<uintptr_t>(p.qkv) |
        reinterpret_cast<uintptr_t>(p.kv.cache) | reinterpret_cast<uintptr_t>(p.cos_sin) |
        reinterpret_cast<uintptr_t>(p.q_norm) | reinterpret_cast<uintptr_t>(p.k_norm) |
        reinterpret_cast<uintptr_t>(p.partials);
    const bool aligned = addresses % kChunkBytes == 0 && p.qkv_stride % kChunk == 0;
    if (p.kv.head_dim / 2 % kChunk == 0) return launch_rope_kv<T, kChunk>(p, aligned, stream);
    launch_rope_kv<T, 1>(p, true, stream);
  });
}

}  // namespace minivllm::cuda
