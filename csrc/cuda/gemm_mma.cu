// out = x W^T in bfloat16 and float16 on the tensor cores of any card from sm_80 on, for what the
// kernel for Hopper does not take: any shape, any stride.
//
// Each output is one chain of mma.sync m16n8k16 over each of up to four parts of K, whose sums are
// added in order: on Hopper the bits of gemm_sm90.cuh with as many chunks. For few tokens the four
// warps of a CTA have a part each (gemm_split.cuh); for many, all warps of a CTA go through the
// parts together and share a wide tile. Nothing of this follows from the tile's size or from a
// row's place in it.
#include "gemm.cuh"
#include "gemm_split.cuh"

namespace minivllm::cuda {
namespace {

using namespace plain;

constexpr int kMaxParts = 4;
constexpr int kPadK = 64;  // K is filled up with zeros to a multiple of it

using sm80::load_matrices;

// A warp's sums: kTokens x kColumns in fragments of 16 x 8, of which a lane has two pairs.
template <typename T, int kTokens, int kColumns>
struct Fragments {
  static constexpr int kRows16 = kTokens / 16, kColumns16 = kColumns / 16;
  static_assert(kTokens % 16 == 0 && kColumns % 16 == 0);

  float at[kRows16][2 * kColumns16][4];

  __device__ explicit Fragments(float first) {
#pragma unroll
    for (int i = 0; i < kRows16 * 2 * kColumns16 * 4; ++i)
      at[i / (8 * kColumns16)][i / 4 % (2 * kColumns16)][i % 4] = first;
  }

  __device__ void take(Fragments& other) {  // adds the other and clears it
#pragma unroll
    for (int i = 0; i < kRows16 * 2 * kColumns16 * 4; ++i) {
      float& from = other.at[i / (8 * kColumns16)][i / 4 % (2 * kColumns16)][i % 4];
      at[i / (8 * kColumns16)][i / 4 % (2 * kColumns16)][i % 4] += from;
      from = 0.0f;
    }
  }

  // kStep / 16 links of every chain. tokens, columns: places of rows of kStep elements.
  template <int kStep>
  __device__ __forceinline__ void multiply(uint32_t tokens, uint32_t columns, int lane) {
    constexpr int kRowVecs = kStep * sizeof(T) / kVecBytes;
    const auto place = [](int row, int vec) {
      return static_cast<uint32_t>((row * kRowVecs + (vec ^ swizzle<kRowVecs>(row))) * kVecBytes);
    };
#pragma unroll
    for (int step = 0; step < kStep / 16; ++step) {
      uint32_t a[kRows16][4], b[kColumns16][4];
#pragma unroll
      for (int i = 0; i < kRows16; ++i)
        load_matrices(a[i], tokens + place(i * 16 + lane % 16, 2 * step + lane / 16));
#pragma unroll
      for (int j = 0; j < kColumns16; ++j)
        load_matrices(b[j],
                      columns + place(j * 16 + lane / 16 * 8 + lane % 8, 2 * step + lane / 8 % 2));
#pragma unroll
      for (int i = 0; i < kRows16; ++i)
#pragma unroll
        for (int j = 0; j < 2 * kColumns16; ++j)
          sm80::mma<T>(at[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }

  // Calls f(token, column, low, high) for each pair of every kParts-th part of the tokens.
  template <int kParts, int kPart, typename F>
  __device__ __forceinline__ void for_pairs(int lane, F&& f) const {
    constexpr int kCount = kRows16 / kParts;
    static_assert(kRows16 % kParts == 0);
#pragma unroll
    for (int i = 0; i < kCount; ++i)
#pragma unroll
      for (int j = 0; j < 2 * kColumns16; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float (&four)[4] = at[kPart * kCount + i][j];
          f(i * 16 + half * 8 + lane / 4, j * 8 + lane % 4 * 2, four[2 * half], four[2 * half + 1]);
        }
  }
};

// ---- few tokens: a part of K for each warp ---------------------------------------------------

template <typename T_, int kTokens_, int kColumns_, int kStep_, int kStages_>
class Mmas {
 public:
  using T = T_;
  static constexpr int kWarps = kMaxParts, kPad = kPadK;
  static constexpr int kTokens = kTokens_, kColumns = kColumns_, kStep = kStep_;
  static constexpr int kStages = kStages_;

  __device__ explicit Mmas(int lane) : lane(lane), sums(0.0f) {}

  __device__ __forceinline__ void multiply(const void* stage) {
    const uint32_t tokens = static_cast<uint32_t>(__cvta_generic_to_shared(stage));
    constexpr uint32_t kTokenBytes = kTokens * kStep * sizeof(T);
    sums.template multiply<kStep>(tokens, tokens + kTokenBytes, lane);
  }

  template <int kHalves, int kHalf>
  __device__ __forceinline__ void put(float* rows, int stride) const {
    sums.template for_pairs<kHalves, kHalf>(
        lane, [&](int token, int column, float low, float high) {
          *reinterpret_cast<float2*>(rows + token * stride + column) = make_float2(low, high);
        });
  }

 private:
  const int lane;
  Fragments<T, kTokens, kColumns> sums;
};

// ---- many tokens: a wide tile for all warps --------------------------------------------------

constexpr int kWideTokens = 128, kWideColumns = 128;
constexpr int kTokenWarps = 2, kColumnWarps = 4;
constexpr int kWideThreads = kTokenWarps * kColumnWarps * kWarpSize;
constexpr int kWideStep = 64, kWideStages = 3;
constexpr int kWideStageBytes = (kWideTokens + kWideColumns) * kWideStep * 2;
constexpr int kWideSmem = kWideStages * kWideStageBytes;
static_assert(kWideStep == kPadK);

template <typename T>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_kernel(const __grid_constant__ SplitProblem p) {
  extern __shared__ uint4 smem[];
  pdl_launch_dependents();
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int thread = static_cast<int>(threadIdx.x);
  const int2 tile = p.tiles.at(static_cast<int>(blockIdx.x));
  const int first_token = tile.x * kWideTokens, first_column = tile.y * kWideColumns;
  const Rows<T> x = {static_cast<const T*>(p.x) + first_token * p.x_stride, p.x_stride,
                     p.output.num_tokens - first_token, p.k};
  const Rows<T> weight = {
      static_cast<const T*>(p.weight) + static_cast<int64_t>(first_column) * p.k, p.k,
      p.output.n - first_column, p.k};
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  constexpr uint32_t kRowBytes = kWideStep * sizeof(T), kTokenBytes = kWideTokens * kRowBytes;
  const auto stage = [&](int step) { return ring + step % kWideStages * kWideStageBytes; };
  const auto copy_weight = [&](int step) {
    copy_rows<kWideColumns, kWideStep, kWideThreads, true>(stage(step) + kTokenBytes, weight,
                                                           step * kWideStep, thread);
  };
  const auto copy_x = [&](int step) {
    copy_rows<kWideTokens, kWideStep, kWideThreads, true>(stage(step), x, step * kWideStep, thread);
  };
  const int steps = (p.k + kWideStep - 1) / kWideStep, part_steps = p.part / kWideStep;
  constexpr int kAhead = kWideStages - 1;
#pragma unroll
  for (int step = 0; step < kAhead; ++step)
    if (step < steps) copy_weight(step);
  pdl_wait();
#pragma unroll
  for (int step = 0; step < kAhead; ++step) {
    if (step < steps) copy_x(step);
    commit_copies();
  }

  constexpr int kWarpTokens = kWideTokens / kTokenWarps;
  constexpr int kWarpColumns = kWideColumns / kColumnWarps;
  const int warp_token = warp / kColumnWarps * kWarpTokens;
  const int warp_column = warp % kColumnWarps * kWarpColumns;
  using Sums = Fragments<T, kWarpTokens, kWarpColumns>;
  Sums sums(0.0f), total(-0.0f);  // what is added to -0 keeps its sign
  int step = 0;
  while (step < steps) {
    for (const int end = min(step + part_steps, steps); step < end; ++step) {
      wait_copies<kAhead - 1>();
      __syncthreads();
      if (step + kAhead < steps) {
        copy_weight(step + kAhead);
        copy_x(step + kAhead);
      }
      commit_copies();
      sums.template multiply<kWideStep>(stage(step) + warp_token * kRowBytes,
                                        stage(step) + kTokenBytes + warp_column * kRowBytes, lane);
    }
    total.take(sums);
  }
  total.template for_pairs<1, 0>(lane, [&](int token, int column, float low, float high) {
    store_pair<T>(p.output, first_token + warp_token + token, first_column + warp_column + column,
                  low, high);
  });
}

template <typename T>
void launch_wide(const LinearParams& p, int part, Stream stream) {
  SplitProblem problem = {};
  problem.x = p.x;
  problem.weight = p.weight;
  problem.x_stride = p.x_stride;
  problem.k = static_cast<int>(p.k);
  problem.part = part;
  problem.tiles = {ceil_div(p.num_tokens, kWideTokens), ceil_div(p.n, kWideColumns)};
  problem.output = output_of(p, sizeof(T));
  const int64_t tiles = tiles_of(p, kWideTokens, kWideColumns);
  MINIVLLM_LAUNCH(wide_kernel<T>, dim3(static_cast<unsigned>(tiles)), dim3(kWideThreads), kWideSmem,
                  stream, problem);
}

template <typename T>
void launch_gemm(const LinearParams& p, int part, Stream stream) {
  const int sms = num_sms();
  const auto fill = [&](int tokens, int columns) {
    return 4 * tiles_of(p, tokens, columns) >= 3 * sms;  // most SMs have a tile
  };
  using Middle = Mmas<T, 32, 32, 64, 3>;
  if (!aligned(p, sizeof(T))) return launch_split<Middle, false>(p, part, stream);
  if (p.num_tokens <= 16) {
    if (tiles_of(p, 16, 32) >= 2 * sms)
      return launch_split<Mmas<T, 16, 32, 64, 4>>(p, part, stream);
    return launch_split<Mmas<T, 16, 16, 64, 6>>(p, part, stream);
  }
  if (p.num_tokens <= 32 && !fill(32, 32))
    return launch_split<Mmas<T, 32, 16, 64, 4>>(p, part, stream);
  if (p.num_tokens > 64 && fill(kWideTokens, kWideColumns)) return launch_wide<T>(p, part, stream);
  if (p.num_tokens > 32 && fill(64, 64))
    return launch_split<Mmas<T, 64, 64, 32, 3>>(p, part, stream);
  launch_split<Middle>(p, part, stream);
}

}  // namespace

void launch_gemm_mma(const LinearParams& p, int num_parts, Stream stream) {
  if (num_parts > kMaxParts) throw std::invalid_argument("launch_gemm_mma: too many parts");
  const int part = ceil_div(p.k, num_parts * kPadK) * kPadK;
  if (p.dtype == DType::kBFloat16) return launch_gemm<__nv_bfloat16>(p, part, stream);
  launch_gemm<__half>(p, part, stream);
}

}  // namespace minivllm::cuda
