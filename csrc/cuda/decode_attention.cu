// Attention of one new token a sequence over its blocks: bound by reading keys and values once.
//
// The query heads of one KV head are the rows of an m16 product (16 a head tile), so keys and
// values are read once for all of them. The unit of work is a split of 256 keys of one (sequence,
// head tile); block = 4 warps that compute, warp w works on tile w of the split:
//   scores of its tile -> maxima of all tiles through shared memory -> probabilities of its tile
//   -> through shared memory -> values of all tiles for a quarter of head_dim
// which is the arithmetic of attention_common.cuh, tile after tile, with the tiles' scores computed
// side by side. Keys and values of a split arrive by cp.async in a ring of units (256 keys or 256
// values); each warp fetches the rows that it addresses itself through the block table.
//
// The grid is fixed; every block finds its share of the work from seq_lens: an equal run of tiles,
// so ragged lengths balance. Splits of one row that fall in one block merge in registers; a row cut
// by a border of two shares leaves its splits in the workspace, and the block that arrives last
// merges them in order, by a fifth warp, beside the computation. Where the borders fall changes no
// bit. On Hopper decode_sm90.cuh and, for few rows, decode_quick.cuh take the head and block sizes
// that TMA can address.
// https://arxiv.org/abs/2205.14135, https://arxiv.org/abs/2309.06180
#include <algorithm>

#include "attention_common.cuh"
#include "attention_host.cuh"
#include "decode_finish.cuh"
#include "decode_quick.cuh"
#include "decode_sm90.cuh"
#include "decode_split.cuh"

namespace minivllm::cuda {
namespace {

using namespace attention;

constexpr int kThreads = kDecodeComputeThreads + kWarpSize;
constexpr int64_t kMaxPartialBytes = int64_t{32} << 20;

// Shared memory, in order: ring, exchange, scratch, tile counts.
template <int kHeadDim, int kUnits>
struct Layout {
  static constexpr int kTileBytes = kTileTokens * kHeadDim * 2;
  static constexpr int kUnitBytes = kTilesPerSplit * kTileBytes;
  static constexpr int kExchange = kUnits * kUnitBytes;
  static constexpr int kScratch = kExchange + SplitExchange::kBytes;
  static constexpr int kCounts = kScratch + 64;
  static constexpr int bytes(int64_t num_seqs) {
    return kCounts + static_cast<int>(num_seqs + 1) * 4;
  }
  static constexpr int kBlocksPerSm =
      kHeadDim <= 64 && 2 * (bytes(kDecodeMaxSeqs / 2) + kSmemReserved) <= kSmemPerSm ? 2 : 1;
};

// What a warp needs to fetch its tile of a split: lane i addresses rows i and i + 32.
struct Fetch {
  DecodeItem item;
  int valid;         // rows of the tile that exist
  int32_t block[2];  // table entries, read half a split before they are used
  uint32_t offset[2];
  uint32_t row[2];
  bool values;  // the next unit holds the split's values
};

template <typename T, int kHeadDim>
__device__ __forceinline__ void fetch_tile(uint32_t destination, const T* cache, const Fetch& f,
                                           uint32_t shift) {
  constexpr int kPieces = kHeadDim / 8;
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int i = 0; i < kTileTokens * kPieces / kWarpSize; ++i) {
    const int index = i * kWarpSize + lane;
    const int row = index / kPieces, piece = index % kPieces;
    uint32_t source;
    if constexpr (kWarpSize % kPieces == 0) {
      source = __shfl_sync(kFullMask, f.row[i * (kWarpSize / kPieces) / kWarpSize], row);
    } else {
      const uint32_t low = __shfl_sync(kFullMask, f.row[0], row);
      const uint32_t high = __shfl_sync(kFullMask, f.row[1], row);
      source = row < kWarpSize ? low : high;
    }
    const bool exists = row < f.valid;
    copy_async(destination + tile_offset<kHeadDim>(row, piece),
               cache + static_cast<uint64_t>(exists ? source + shift : 0) * kHeadDim + piece * 8,
               exists);
  }
}

template <typename T, int kHeadDim, int kUnits>
__global__ void __launch_bounds__(kThreads, (Layout<kHeadDim, kUnits>::kBlocksPerSm))
    decode_attention_kernel(const __grid_constant__ DecodeWork w) {
  using L = Layout<kHeadDim, kUnits>;
  const AttentionParams& p = w.p;
  const KvCache& kv = p.kv;
  pdl_launch_dependents();
  pdl_wait();

  extern __shared__ __align__(128) uint8_t smem[];
  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(smem));
  const SplitExchange x(smem + L::kExchange);
  int* counts = reinterpret_cast<int*>(smem + L::kCounts);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_seqs = static_cast<int>(p.num_seqs);
  const T* cache = static_cast<const T*>(kv.cache);
  const int most_tiles =
      count_tiles<kThreads>(p, counts, reinterpret_cast<int*>(smem + L::kScratch));

  const Share share(w, counts, most_tiles);
  if (share.total == 0) return;
  const int end = share.border(counts, share.run + 1);
  DecodeItem item = share.find(counts, share.run);
  if (item.first >= end) return;
  if (warp == kDecodeWarps) return finish_rows<T, kHeadDim>(w, counts, share, item);

  Fetch f;
  f.item = item;
  f.values = false;
  auto look_up = [&] {  // table entries of the tile to fetch next
    f.valid = 0;
    f.block[0] = f.block[1] = 0;
    f.offset[0] = f.offset[1] = 0;
    if (f.item.first >= end) return;
    const int start = f.item.split * kSplitTokens + warp * kTileTokens;
    f.valid = min(kTileTokens, p.seq_lens[f.item.seq] - start);
    const int32_t* table = kv.block_table + p.slots[f.item.seq] * kv.block_table_stride;
    const unsigned block_size = static_cast<unsigned>(kv.block_size);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int r = lane + i * kWarpSize;
      if (r >= f.valid) continue;
      const unsigned index = static_cast<unsigned>(start + r) / block_size;
      f.offset[i] = static_cast<unsigned>(start + r) - index * block_size;
      f.block[i] = table[index];
    }
  };
  uint32_t unit_at = ring + warp * L::kTileBytes;
  const uint32_t ring_end = ring + kUnits * L::kUnitBytes;
  auto fetch_unit = [&] {
    if (f.item.first < end) {
      const uint32_t heads = static_cast<uint32_t>(kv.num_kv_heads);
      const uint32_t block_size = static_cast<uint32_t>(kv.block_size);
      if (!f.values) {
        const uint32_t head = f.item.head_tile / w.tiles_a_head;
#pragma unroll
        for (int i = 0; i < 2; ++i)
          f.row[i] =
              (static_cast<uint32_t>(f.block[i]) * 2 * heads + head) * block_size + f.offset[i];
      }
      if (f.valid > 0)
        fetch_tile<T, kHeadDim>(unit_at, cache, f, f.values ? heads * block_size : 0);
      if (f.values) {
        advance(f.item, counts, num_seqs);
        look_up();
      }
      f.values = !f.values;
    }
    commit_copies();
    unit_at += L::kUnitBytes;
    if (unit_at >= ring_end) unit_at -= kUnits * L::kUnitBytes;
  };

  uint32_t q[kHeadDim / kMmaDepth][4];
  auto load_q = [&](const DecodeItem& at) {
    const QueryHeads heads(w, at.head_tile);
    const T* base = static_cast<const T*>(p.q) + (at.seq * p.num_q_heads + heads.first) * kHeadDim;
    const int r = lane / 4;
    load_queries<T, kHeadDim>(q, r < heads.count ? base + r * kHeadDim : nullptr,
                              r + 8 < heads.count ? base + (r + 8) * kHeadDim : nullptr);
  };

  look_up();
#pragma unroll 1
  for (int u = 0; u < kUnits; ++u) fetch_unit();
  load_q(item);
  int length = p.seq_lens[item.seq];
  RowSoFar<T, kHeadDim> row(item);
  const bool both = w.rows > 8;
  uint32_t read_at = ring;
  auto next_unit = [&] {
    read_at += L::kUnitBytes;
    if (read_at >= ring_end) read_at = ring;
  };

  while (item.first < end) {
    const int tiles = item.tiles_here();
    DecodeItem next = item;
    advance(next, counts, num_seqs);
    const bool more = next.first < end;

    float s[kScores];
    wait_copies<kUnits - 1>();
    __syncwarp();
    if (warp < tiles) {
      score_tile<T, kHeadDim>(s, q, read_at + warp * L::kTileBytes);
      publish_maxima(s, length - 1 - item.split * kSplitTokens - warp * kTileTokens, both, x);
    }
    __syncwarp();  // the tile of keys has been read, its place can be filled
    next_unit();
    fetch_unit();
    if (more) {
      if (next.seq != item.seq) {
        load_q(next);
        length = p.seq_lens[next.seq];
      }
    }
    compute_barrier();

    RowState<kHeadDim> state;
    float factor[kTilesPerSplit][2];
    publish_probabilities<T, kHeadDim>(s, tiles, both, w.c, x, factor, state);
    wait_copies<kUnits - 1>();
    compute_barrier();

#pragma unroll
    for (int t = 0; t < kTilesPerSplit; ++t) {
      if (t >= tiles) break;
      add_values<T, kHeadDim>(state, t, factor[t], x, read_at + t * L::kTileBytes);
    }
    end_split(state);
    compute_barrier();  // the values have been read
    next_unit();
    fetch_unit();
    row.add(w, counts, item, more, state);
    item = next;
  }
}

int64_t partial_bytes(int64_t num_seqs, int64_t max_seq_len, int64_t num_q_heads,
                      int64_t head_dim) {
  const int64_t splits = (max_seq_len + kSplitTokens - 1) / kSplitTokens + 1;
  const int64_t bytes = num_seqs * splits * num_q_heads * (head_dim + 2) * 4;
  return bytes < kMaxPartialBytes ? bytes : kMaxPartialBytes;
}

template <typename T, int kHeadDim, int kUnits>
void launch_decode(DecodeWork w, int64_t max_blocks, Stream stream) {
  using L = Layout<kHeadDim, kUnits>;
  const int64_t grid = decode_grid(
      std::min<int64_t>(max_blocks, int64_t{num_sms()} * L::kBlocksPerSm), w.head_tiles);
  w.num_ctas = static_cast<int>(grid);
  MINIVLLM_LAUNCH(decode_attention_kernel<T, kHeadDim, kUnits>, dim3(static_cast<unsigned>(grid)),
                  dim3(kThreads), L::bytes(w.p.num_seqs), stream, w);
}

template <typename T, int kHeadDim>
void launch_decode(const AttentionParams& p, Stream stream) {
  DecodeWork w = {};
  w.p = p;
  w.c = p.scale * kLog2e;
  w.group = static_cast<int>(p.num_q_heads / p.kv.num_kv_heads);
  const bool hopper = has_decode_sm90(kHeadDim) && decode_sm90_supported(p);
  w.tile_heads = hopper ? kWarpHeads : kMmaRows;
  w.tiles_a_head = (w.group + w.tile_heads - 1) / w.tile_heads;
  w.head_tiles = static_cast<int>(p.kv.num_kv_heads) * w.tiles_a_head;
  w.rows = std::min(w.group, w.tile_heads);
  w.capacity = partial_bytes(p.num_seqs, p.max_seq_len, p.num_q_heads, kHeadDim) /
               (w.rows * (kHeadDim + 2) * 4);
  const int64_t splits = (p.max_seq_len + kSplitTokens - 1) / kSplitTokens;
  const int64_t max_blocks =
      std::max<int64_t>(1, std::min<int64_t>(p.num_seqs * w.head_tiles * splits, kDecodeMaxBlocks));
  if constexpr (has_decode_sm90(kHeadDim)) {
    if (hopper) {
      if (launch_decode_quick<T, kHeadDim>(w, stream)) return;
      return launch_decode_sm90<T, kHeadDim>(w, max_blocks, stream);
    }
  }
  // Three units where shared memory has room for them.
  if (compute_capability() == 90 || compute_capability() == 100) {
    launch_decode<T, kHeadDim, 3>(w, max_blocks, stream);
  } else {
    launch_decode<T, kHeadDim, 2>(w, max_blocks, stream);
  }
}

}  // namespace

int64_t attention_workspace_size(int64_t max_seqs, int64_t max_seq_len, int64_t num_q_heads,
                                 int64_t head_dim) {
  return kCounterBytes + partial_bytes(max_seqs, max_seq_len, num_q_heads, head_dim);
}

void decode_attention(const AttentionParams& p, Stream stream) {
  if (p.num_seqs == 0) return;
  attention::check_attention(p);
  if (p.dtype == DType::kFloat32) return attention::launch_simt_attention(p, stream);
  for (int64_t from = 0; from < p.num_seqs; from += kDecodeMaxSeqs) {
    AttentionParams part = p;
    const int64_t elements = from * p.num_q_heads * p.kv.head_dim;
    part.num_seqs = part.num_tokens = std::min<int64_t>(kDecodeMaxSeqs, p.num_seqs - from);
    part.slots += from;
    part.seq_lens += from;
    part.q = static_cast<const uint16_t*>(p.q) + elements;
    part.out = static_cast<uint16_t*>(p.out) + elements;
    dispatch_dtype(p.dtype, [&](auto element) {
      using T = decltype(element);
      if constexpr (sizeof(T) == 2) {
        attention::dispatch_head_dim(p.kv.head_dim, [&](auto head_dim) {
          launch_decode<T, decltype(head_dim)::value>(part, stream);
        });
      }
    });
  }
}

}  // namespace minivllm::cuda
