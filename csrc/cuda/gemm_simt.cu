// out = x W^T in float32 on the plain float units: any shape, any stride.
//
// Each output is eight chains of fused multiply-adds over k, over equal parts of K (a multiple of
// 32 elements), whose sums are added in order. The eight warps of a CTA have a part each
// (gemm_split.cuh). Nothing of this follows from the tile's size or from a row's place in it, so
// few tokens have narrow tiles, many have wide ones, and the bits are the same.
#include "gemm.cuh"
#include "gemm_split.cuh"

namespace minivllm::cuda {
namespace {

using namespace plain;

// kTokens x kColumns outputs a warp; kTokenLanes lanes go down the tokens, the others across.
template <int kTokens_, int kColumns_, int kTokenLanes, int kStep_, int kStages_>
class Fmas {
 public:
  using T = float;
  static constexpr int kWarps = 8, kPad = 32;
  static constexpr int kTokens = kTokens_, kColumns = kColumns_, kStep = kStep_;
  static constexpr int kStages = kStages_;

  __device__ explicit Fmas(int lane)
      : token_lane(lane / kColumnLanes), column_lane(lane % kColumnLanes) {}

  // kStep links of every chain. Four elements of a row are read at once.
  __device__ __forceinline__ void multiply(const void* stage) {
    const float4* x = static_cast<const float4*>(stage) + token_lane * kRowVecs;
    const float4* weight = static_cast<const float4*>(stage) + (kTokens + column_lane) * kRowVecs;
#pragma unroll
    for (int vec = 0; vec < kRowVecs; ++vec) {
      float4 w[kLaneColumns];
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j) {
        const int place = vec ^ swizzle<kRowVecs>(column_lane);  // 8 rows on it is the same
        w[j] = weight[j * kColumnLanes * kRowVecs + place];
      }
#pragma unroll
      for (int i = 0; i < kLaneTokens; ++i) {
        const int row = i * kTokenLanes, place = vec ^ swizzle<kRowVecs>(row + token_lane);
        const float4 a = x[row * kRowVecs + place];
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) sums[i][j] = fmaf(a.x, w[j].x, sums[i][j]);
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) sums[i][j] = fmaf(a.y, w[j].y, sums[i][j]);
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) sums[i][j] = fmaf(a.z, w[j].z, sums[i][j]);
#pragma unroll
        for (int j = 0; j < kLaneColumns; ++j) sums[i][j] = fmaf(a.w, w[j].w, sums[i][j]);
      }
    }
  }

  template <int kHalves, int kHalf>
  __device__ __forceinline__ void put(float* rows, int stride) const {
    constexpr int kCount = kLaneTokens / kHalves;
#pragma unroll
    for (int i = 0; i < kCount; ++i)
#pragma unroll
      for (int j = 0; j < kLaneColumns; ++j)
        rows[(i * kTokenLanes + token_lane) * stride + j * kColumnLanes + column_lane] =
            sums[kHalf * kCount + i][j];
  }

 private:
  static constexpr int kColumnLanes = kWarpSize / kTokenLanes;
  static constexpr int kLaneTokens = kTokens / kTokenLanes, kLaneColumns = kColumns / kColumnLanes;
  static constexpr int kRowVecs = kStep * sizeof(float) / kVecBytes;
  static_assert(kPad % kStep == 0 && kColumnLanes % kLineVecs == 0);

  const int token_lane, column_lane;
  float sums[kLaneTokens][kLaneColumns] = {};
};

int max_shared_memory() {
  int device = 0, bytes = 0;
  MINIVLLM_CHECK(cudaGetDevice(&device));
  MINIVLLM_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  return bytes;
}

}  // namespace

// Shared memory gives a lane one word in the time of four multiply-adds. So a lane's share of a
// tile is as large and as square as its registers allow.
void launch_gemm_simt(const LinearParams& p, Stream stream) {
  using Middle = Fmas<32, 32, 4, 16, 3>;
  constexpr int kParts = Middle::kWarps;
  const int part = ceil_div(p.k, kParts * Middle::kPad) * Middle::kPad;
  const int sms = num_sms();
  const auto fill = [&](int tokens, int columns) {
    return 4 * tiles_of(p, tokens, columns) >= 3 * sms;  // most SMs have a tile
  };
  if (!aligned(p, sizeof(float))) return launch_split<Middle, false>(p, part, stream);
  if (p.num_tokens <= 2) return launch_split<Fmas<2, 16, 2, 32, 4>>(p, part, stream);
  if (p.num_tokens <= 4) return launch_split<Fmas<4, 16, 4, 32, 4>>(p, part, stream);
  if (p.num_tokens <= 8) return launch_split<Fmas<8, 16, 4, 32, 4>>(p, part, stream);
  if (p.num_tokens <= 16) {
    if (fill(16, 32)) return launch_split<Fmas<16, 32, 4, 16, 4>>(p, part, stream);
    return launch_split<Fmas<16, 16, 4, 16, 6>>(p, part, stream);
  }
  if (p.num_tokens <= 32 && !fill(32, 32))
    return launch_split<Fmas<32, 16, 4, 16, 4>>(p, part, stream);
  if (p.num_tokens <= 32 || !fill(64, 64)) return launch_split<Middle>(p, part, stream);
  using Wide = Fmas<64, 64, 4, 16, 2>;
  if (SplitPlan<Wide>::kSmem <= max_shared_memory()) return launch_split<Wide>(p, part, stream);
  launch_split<Fmas<64, 64, 4, 8, 3>>(p, part, stream);
}

}  // namespace minivllm::cuda
