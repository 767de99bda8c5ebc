// Attention in float32 without tensor cores: one warp a query row, keys 32 at a time in order. It
// is the path for checks against float32 references; decode and prefill run the same kernel, so
// their bits agree.
#include "attention_common.cuh"
#include "attention_host.cuh"

namespace minivllm::cuda::attention {
namespace {

constexpr int kSimtWarps = 4;
constexpr int kSimtDims = 8;  // dims of a lane
constexpr int kSimtMaxHeadDim = kSimtDims * kWarpSize;

// The sequence that owns row `token`: the last s with q_starts[s] <= token.
__device__ __forceinline__ int64_t find_sequence(const int32_t* q_starts, int64_t num_seqs,
                                                 int64_t token) {
  int64_t low = 0, high = num_seqs - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (q_starts[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

__global__ void __launch_bounds__(kSimtWarps* kWarpSize)
    simt_attention_kernel(const AttentionParams p) {
  pdl_launch_dependents();
  pdl_wait();
  __shared__ float queries[kSimtWarps][kSimtMaxHeadDim];
  const int lane = threadIdx.x % kWarpSize;
  const int warp = threadIdx.x / kWarpSize;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kSimtWarps + warp;
  if (row >= p.num_tokens * p.num_q_heads) return;
  const int64_t token = row / p.num_q_heads;
  const int head = static_cast<int>(row % p.num_q_heads);
  const int64_t seq = p.q_starts ? find_sequence(p.q_starts, p.num_seqs, token) : token;
  const int slot = p.slots[seq];
  if (slot < 0) return;
  int num_keys = p.seq_lens[seq];
  if (p.q_starts) {
    const int q_end = p.q_starts[seq + 1];
    if (token >= q_end) return;
    num_keys -= static_cast<int>(q_end - 1 - token);
  }

  const KvCache& kv = p.kv;
  const int head_dim = static_cast<int>(kv.head_dim);
  const int kv_head = static_cast<int>(head / (p.num_q_heads / kv.num_kv_heads));
  const int32_t* table = kv.block_table + slot * kv.block_table_stride;
  const float* cache = static_cast<const float*>(kv.cache);
  const int64_t value_offset = kv.num_kv_heads * kv.block_size * kv.head_dim;
  const float* q = static_cast<const float*>(p.q) + row * head_dim;
  for (int d = lane; d < head_dim; d += kWarpSize) queries[warp][d] = q[d];
  __syncwarp();

  const float c = p.scale * kLog2e;
  float m = -INFINITY, l = 0.f;
  float o[kSimtDims] = {};
  for (int start = 0; start < num_keys; start += kWarpSize) {
    float s = -INFINITY;
    int64_t key = 0;
    if (start + lane < num_keys) {
      key = static_cast<int64_t>(key_row(kv, table, kv_head, start + lane)) * head_dim;
      s = 0.f;
      for (int d = 0; d < head_dim; ++d) s = fmaf(queries[warp][d], cache[key + d], s);
    }
    float top = s;
#pragma unroll
    for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
      top = fmaxf(top, __shfl_xor_sync(kFullMask, top, offset));
    top = fmaxf(m, top);
    const float shift = exponent_shift(top, c);
    const float factor = rescale_factor(m, c, shift);
    const float probability = exp2f(fmaf(s, c, -shift));
    m = top;
    l = fmaf(l, factor, warp_sum(probability));
#pragma unroll
    for (int i = 0; i < kSimtDims; ++i) o[i] = __fmul_rn(o[i], factor);
    const int count = min(kWarpSize, num_keys - start);
    for (int j = 0; j < count; ++j) {
      const float pj = __shfl_sync(kFullMask, probability, j);
      const float* value = cache + __shfl_sync(kFullMask, key, j) + value_offset;
#pragma unroll
      for (int i = 0; i < kSimtDims; ++i) {
        const int d = lane + i * kWarpSize;
        if (d < head_dim) o[i] = fmaf(pj, value[d], o[i]);
      }
    }
  }
  float* out = static_cast<float*>(p.out) + row * head_dim;
#pragma unroll
  for (int i = 0; i < kSimtDims; ++i) {
    const int d = lane + i * kWarpSize;
    if (d < head_dim) out[d] = __fdiv_rn(o[i], l);
  }
}

}  // namespace

void launch_simt_attention(const AttentionParams& p, Stream stream) {
  if (p.kv.head_dim > kSimtMaxHeadDim)
    throw std::invalid_argument("attention: no float32 kernel for head_dim " +
                                std::to_string(p.kv.head_dim));
  const int64_t rows = p.num_tokens * p.num_q_heads;
  const auto grid = static_cast<unsigned>((rows + kSimtWarps - 1) / kSimtWarps);
  MINIVLLM_LAUNCH(simt_attention_kernel, dim3(grid), dim3(kSimtWarps * kWarpSize), 0, stream, p);
}

}  // namespace minivllm::cuda::attention
