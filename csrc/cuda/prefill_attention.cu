// Causal attention of many new tokens a sequence over their blocks: bound by the tensor cores and
// by exponentials. Two kernels with the same bits: prefill_sm90.cuh (wgmma, TMA) where the card,
// the head size and the block size allow it, and this file's (mma.sync, cp.async) everywhere else.
//
// Here: block = 4 warps of 16 query rows, tiles of 64 keys double-buffered in shared memory, keys
// addressed one by one through the block table. https://arxiv.org/abs/2205.14135
#include "attention_common.cuh"
#include "attention_host.cuh"
#include "prefill_rows.cuh"
#include "prefill_sm90.cuh"

namespace minivllm::cuda {
namespace {

using namespace attention;

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kTileRows = kWarps * kMmaRows;
constexpr int kWarpKeys = kTileTokens / kWarps;  // rows of a tile that one warp fetches

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kThreads)
    prefill_attention_kernel(const AttentionParams p, int group, float c) {
  constexpr int kTileBytes = kTileTokens * kHeadDim * 2;
  constexpr int kBlocks = kHeadDim / 8;
  constexpr int kPieces = kHeadDim / 8;
  pdl_launch_dependents();
  pdl_wait();
  extern __shared__ __align__(128) uint8_t smem[];  // [2][keys, values]
  const uint32_t tiles_at = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;

  const QueryTile tile = find_query_tile(p, group, kTileRows, static_cast<int>(blockIdx.x));
  if (tile.seq >= p.num_seqs) return;
  const int slot = p.slots[tile.seq];
  if (slot < 0) return;
  const KvCache& kv = p.kv;
  const QueryRows rows = query_rows(p, tile.seq, group, static_cast<int>(blockIdx.y));
  const int32_t* table = kv.block_table + slot * kv.block_table_stride;
  const T* cache = static_cast<const T*>(kv.cache);
  const uint32_t value_shift = static_cast<uint32_t>(kv.num_kv_heads * kv.block_size);

  const int row0 = tile.tile * kTileRows + warp * kMmaRows + lane / 4, row1 = row0 + 8;
  const int last0 = rows.position(row0), last1 = rows.position(row1);
  const int num_tiles = rows.position((tile.tile + 1) * kTileRows - 1) / kTileTokens + 1;

  auto fetch = [&](int t) {
    if (t < num_tiles) {
      const uint32_t to = tiles_at + (t % 2) * 2 * kTileBytes;
      const int position = t * kTileTokens + warp * kWarpKeys + lane % kWarpKeys;
      const uint32_t own = position < rows.seq_len ? key_row(kv, table, rows.kv_head, position) : 0;
#pragma unroll
      for (int i = 0; i < kWarpKeys * kPieces / kWarpSize; ++i) {
        const int row = (i * kWarpSize + lane) / kPieces;
        const int piece = (i * kWarpSize + lane) % kPieces;
        const uint32_t key = __shfl_sync(kFullMask, own, row);
        const bool exists = t * kTileTokens + warp * kWarpKeys + row < rows.seq_len;
        const uint32_t at = to + tile_offset<kHeadDim>(warp * kWarpKeys + row, piece);
        const T* from = cache + static_cast<uint64_t>(key) * kHeadDim + piece * 8;
        copy_async(at, from, exists);
        copy_async(at + kTileBytes,
                   exists ? from + static_cast<uint64_t>(value_shift) * kHeadDim : from, exists);
      }
    }
    commit_copies();
  };
  fetch(0);

  uint32_t q[kHeadDim / kMmaDepth][4];
  const T* queries = static_cast<const T*>(p.q);
  load_queries<T, kHeadDim>(q, rows.exists(row0) ? queries + rows.offset(row0, kHeadDim) : nullptr,
                            rows.exists(row1) ? queries + rows.offset(row1, kHeadDim) : nullptr);

  float m[2], l[2], o[4 * kBlocks];
  float total_m[2], total_l[2], total_o[4 * kBlocks];
  for (int t = 0; t < num_tiles; ++t) {
    fetch(t + 1);
    wait_copies<1>();
    __syncthreads();
    if (t % kTilesPerSplit == 0) {
      m[0] = m[1] = -INFINITY;
      l[0] = l[1] = 0.f;
#pragma unroll
      for (int i = 0; i < 4 * kBlocks; ++i) o[i] = 0.f;
    }
    const uint32_t keys = tiles_at + (t % 2) * 2 * kTileBytes;
    float s[kScores];
    score_tile<T, kHeadDim>(s, q, keys);
    const int start = t * kTileTokens;
    if (last0 < start + kTileTokens - 1) mask_scores(s, last0 - start, last1 - start);
    const float top0 = fmaxf(m[0], max_score<0>(s)), top1 = fmaxf(m[1], max_score<1>(s));
    const float shift0 = exponent_shift(top0, c), shift1 = exponent_shift(top1, c);
    const float factor[2] = {rescale_factor(m[0], c, shift0), rescale_factor(m[1], c, shift1)};
    m[0] = top0;
    m[1] = top1;
    l[0] = add_tile(l[0], factor[0], exponentiate<0>(s, c, shift0));
    l[1] = add_tile(l[1], factor[1], exponentiate<1>(s, c, shift1));
#pragma unroll
    for (int i = 0; i < 4 * kBlocks; ++i) o[i] = __fmul_rn(o[i], factor[i % 4 / 2]);
#pragma unroll
    for (int k = 0; k < kTileSteps; k += 2) {
      uint32_t a0[4], a1[4];
      probability_operand<T>(a0, s, k);
      probability_operand<T>(a1, s, k + 1);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b)
        value_steps<T, kHeadDim>(o + 4 * b, a0, a1, keys + kTileBytes, k, b);
    }
    __syncthreads();  // the tile has been read, its place can be filled

    if (t % kTilesPerSplit == kTilesPerSplit - 1 || t == num_tiles - 1) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        l[h] = quad_sum(l[h]);
        if (t < kTilesPerSplit) {
          total_m[h] = m[h];
          total_l[h] = l[h];
        } else {
          const Merge merge = merge_split(total_m[h], total_l[h], m[h], l[h], c);
#pragma unroll
          for (int b = 0; b < kBlocks; ++b)
#pragma unroll
            for (int e = 4 * b + 2 * h; e < 4 * b + 2 * h + 2; ++e)
              total_o[e] = merge_value(merge, total_o[e], o[e]);
        }
      }
      if (t < kTilesPerSplit) {
#pragma unroll
        for (int i = 0; i < 4 * kBlocks; ++i) total_o[i] = o[i];
      }
    }
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int row = h == 0 ? row0 : row1;
    if (!rows.exists(row)) continue;
    T* out = static_cast<T*>(p.out) + rows.offset(row, kHeadDim) + 2 * (lane % 4);
    const float inverse = inverse_sum(total_l[h]);
#pragma unroll
    for (int b = 0; b < kBlocks; ++b)
      *reinterpret_cast<uint32_t*>(out + 8 * b) =
          pack<T>(normalise(total_o[4 * b + 2 * h], inverse),
                  normalise(total_o[4 * b + 2 * h + 1], inverse));
  }
}

template <typename T, int kHeadDim>
void launch_prefill(const AttentionParams& p, int group, Stream stream) {
  constexpr size_t kSmem = 4 * kTileTokens * kHeadDim * 2;
  const dim3 grid(static_cast<unsigned>(max_query_tiles(p, group, kTileRows)),
                  static_cast<unsigned>(p.kv.num_kv_heads));
  MINIVLLM_LAUNCH(prefill_attention_kernel<T, kHeadDim>, grid, dim3(kThreads), kSmem, stream, p,
                  group, p.scale * kLog2e);
}

}  // namespace

void prefill_attention(const AttentionParams& p, Stream stream) {
  if (p.num_seqs == 0 || p.num_tokens == 0) return;
  attention::check_attention(p);
  if (p.dtype == DType::kFloat32) return attention::launch_simt_attention(p, stream);
  const int group = static_cast<int>(p.num_q_heads / p.kv.num_kv_heads);
  dispatch_dtype(p.dtype, [&](auto element) {
    using T = decltype(element);
    if constexpr (sizeof(T) == 2) {
      attention::dispatch_head_dim(p.kv.head_dim, [&](auto head_dim) {
        constexpr int kHeadDim = decltype(head_dim)::value;
        if constexpr (attention::has_prefill_sm90(kHeadDim)) {
          if (attention::prefill_sm90_supported(p))
            return attention::launch_prefill_sm90<T, kHeadDim>(p, group, stream);
        }
        launch_prefill<T, kHeadDim>(p, group, stream);
      });
    }
  });
}

}  // namespace minivllm::cuda
