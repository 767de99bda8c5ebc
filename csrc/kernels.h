// One declaration a kernel: a params struct and its launchers, `cuda::f(params, stream)` and
// `cpu::f(params)`.
//
// No torch and no CUDA headers here. Launchers never allocate, synchronise, exit or assert; they
// throw std::runtime_error when a launch fails and std::invalid_argument when a shape has no
// kernel. Pointers are device pointers for cuda::, host pointers for cpu::. Strides count elements.
// Rows that are contiguous say so. "may be null" is said where it may.
//
// The order of additions for one output row never depends on how many rows there are.
#pragma once

#include <cstdint>

#include "kernels_state.h"

struct CUstream_st;

namespace minivllm {

using Stream = CUstream_st*;

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// out[t] = weight[id], id = token_ids[t], or last_tokens[slots[t] * last_tokens_stride] where
// token_ids[t] < 0. An id outside the vocabulary reads row 0: the host refuses such ids, and the
// row is dropped.
struct EmbeddingParams {
  void* out;                   // [num_tokens, hidden_size]
  const void* weight;          // [vocab_size, hidden_size]
  const int32_t* token_ids;    // [num_tokens], -1: the slot's last token
  const int32_t* slots;        // [num_tokens], -1: padding (row 0 is read); null if last_tokens is
  const int32_t* last_tokens;  // [num_slots] at a stride; may be null
  int64_t last_tokens_stride;
  int64_t num_tokens, hidden_size, vocab_size;
  DType dtype;
  // cuda: nothing before it in the stream is still running when it starts, as at a graph's head. So
  // those after it need not wait for its own wait: see AttentionParams::settled.
  bool first;
};

// residual += x (where residual is not null); out = normalised(residual or x) * weight, in float,
// rounded once. https://arxiv.org/abs/1910.07467
struct RmsNormParams {
  void* out;           // [num_rows, hidden_size]
  const void* x;       // [num_rows, hidden_size], rows x_stride apart
  void* residual;      // [num_rows, hidden_size], read and written; may be null
  const void* weight;  // [hidden_size]
  int64_t num_rows, hidden_size, x_stride;
  float eps;
  DType dtype;
  // [num_partials, num_rows, hidden_size]: x as the sums that a product left, to be added in order;
  // needs the residual; null: x is x.
  const float* partials = nullptr;
  int64_t num_partials = 0;
};

// Where the keys and values of one layer live. K of (block, head, offset) starts at
//   cache + block * 2 * num_kv_heads * block_size * head_dim + (head * block_size + offset) *
//   head_dim
// and V num_kv_heads * block_size * head_dim further: a block's K and V lie together.
struct KvCache {
  void* cache;  // [num_blocks, 2, num_kv_heads, block_size, head_dim]
  const int32_t*
      block_table;  // [num_slots, max_blocks], rows block_table_stride apart, -1: no block
  int64_t block_table_stride;
  int64_t num_blocks, max_blocks, num_kv_heads, block_size, head_dim;
};

// Rotates q and k by their positions and writes k and v into their blocks.
// cos_sin holds cos then sin, computed in float64: [max_position, head_dim / 2] each half of a row.
// Pairs are (i, i + head_dim / 2). q_norm / k_norm, where given, are RMSNorm weights applied per
// head before. https://arxiv.org/abs/2104.09864
struct RopeKvParams {
  void* q_out;  // [num_tokens, num_q_heads, head_dim]
  const void*
      qkv;  // [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim], rows qkv_stride apart
  int64_t qkv_stride;
  const float* cos_sin;  // [max_position, head_dim]: cos | sin
  int64_t max_position;
  const int32_t* positions;  // [num_tokens]
  const int32_t* slots;      // [num_tokens], -1: padding, nothing is written to the cache
  const void* q_norm;        // [head_dim]; may be null
  const void* k_norm;        // [head_dim]; may be null
  float eps;
  int64_t num_tokens, num_q_heads;
  KvCache kv;
  DType dtype;
  // [num_partials, num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim]: qkv as the sums that a
  // product left, added in order and rounded to dtype; null: qkv is qkv.
  const float* partials = nullptr;
  int64_t num_partials = 0;
  // With partials: the first half of the rows' RMSNorm is done (see kNormColumns), eps is for the
  // second, and head_dim is 64. May be null.
  const float* square_sums = nullptr;  // [num_tokens, num_square_sums]
  int64_t num_square_sums = 0;
  bool settled = false;  // positions, slots and the block table are: see AttentionParams
};

// Causal attention of new tokens over the keys and values in their slots' blocks (theirs included:
// rope_kv ran before). Sequence s owns the rows q_starts[s] .. q_starts[s+1] of q; its row r stands
// at position seq_lens[s] - (q_starts[s+1] - q_starts[s]) + (r - q_starts[s]) and sees keys 0 ..
// that position. Keys are reduced in splits of kSplitTokens, in tiles of kTileTokens inside a
// split, and splits merge in order: the same arithmetic a row for prefill and decode.
// https://arxiv.org/abs/2205.14135 (online softmax), https://arxiv.org/abs/2309.06180 (blocks)
struct AttentionParams {
  void* out;      // [num_tokens, num_q_heads, head_dim]
  const void* q;  // [num_tokens, num_q_heads, head_dim], contiguous
  const int32_t*
      slots;  // [num_seqs] the block-table row of each sequence, -1: padding (out untouched)
  const int32_t* seq_lens;  // [num_seqs] tokens with KV, the new ones included
  const int32_t*
      q_starts;  // [num_seqs + 1]; null for decode: one row a sequence, row s is sequence s
  int64_t num_seqs, num_tokens, num_q_heads;
  int64_t max_q_len;    // the longest run of new tokens, a bound for the grid
  int64_t max_seq_len;  // a bound for seq_lens
  float scale;
  void* workspace;  // decode on CUDA: bytes of cuda::attention_workspace_size(), zeroed once at
                    // creation; else null
  KvCache kv;
  DType dtype;
  // Decode: a kernel that lets the next ones start late (embedding and embed_and_weigh do), or a
  // graph's beginning, came after the last that wrote to slots, seq_lens, the block table, or any
  // key or value but those of each sequence's last token. So all that may be read before the
  // kernels before have ended.
  bool settled = false;
};

// out = silu(x[:, :n]) * x[:, n:]
struct SiluMulParams {
  void* out;      // [num_tokens, size]
  const void* x;  // [num_tokens, 2 * size], rows x_stride apart
  int64_t num_tokens, size, x_stride;
  DType dtype;
};

// What a matrix product does with its accumulators.
enum class Epilogue : int32_t {
  kNone = 0,      // out = x W^T + bias
  kResidual = 1,  // out += x W^T (out is the residual stream, read and written)
  kSiluMul = 2,  // W's rows come in pairs gate, up, gate, up ...: out[:, i] = silu(y[:, 2i]) * y[:,
                 // 2i + 1]
  kRopeKv = 3,   // W is [q; k; v]: q and k are rotated, q is out, k and v go into blocks (RopeKvTo)
};

// An RMSNorm taken apart, so that it needs no kernel between two products. The one before gives
// rows * norm weight, rounded, and square sums of the rows; the one after divides its outputs:
//   (x / rms(x) * g) W^T = (x * g) W^T / rms(x)
// A square sum is that of kNormColumns columns of a row. See cuda/split_norm.cuh for the order of
// additions.
constexpr int64_t kNormColumns = 64;
// Tokens up to which a product does kRopeKv, or, where K is one chain, the first half of a norm.
constexpr int64_t kMostFusedTokens = 64;

// Where a kRopeKv product puts keys and values; head_dim is 64, as is RopeKvParams' meaning.
struct RopeKvTo {
  const float* cos_sin;  // [max_position, head_dim]: cos | sin
  int64_t max_position;
  const int32_t* positions;  // [num_tokens]
  const int32_t* slots;      // [num_tokens], -1: padding, nothing is written to the cache
  int64_t num_q_heads;
  KvCache kv;
  bool settled;  // positions, slots and the block table are: see AttentionParams
};

// Logits of which most rows need the largest alone: those whose slot has kLeaderSuffices. The
// product then notes the leaders of a row, and writes no logits where no row of a tile wants them.
constexpr int64_t kLeaderColumns = 64;  // of which a leader is the first
struct LeadersTo {
  // [num_tokens, num_leaders(n)]: of the columns' logits the first in order_of's order, as that
  // number (both in sampling_math.h); 0 where one is NaN. Null: no leaders.
  uint64_t* leaders;
  const int32_t* slots;  // [num_tokens], -1: padding, nothing is wanted of the row
  const int32_t* state;  // [num_slots, state_stride], SlotWord
  int64_t state_stride;
};

// out = x W^T: num_chunks chains over equal parts of K for each output, added in order, the same
// for any number of rows.
struct LinearParams {
  void* out;           // [num_tokens, n] ([num_tokens, n / 2] for kSiluMul), rows out_stride apart
  const void* x;       // [num_tokens, k], rows x_stride apart
  const void* weight;  // [n, k] contiguous (cuda::) or as cpu::pack_weight laid it out (cpu::)
  const void* bias;    // [n]; may be null
  int64_t num_tokens, n, k, x_stride, out_stride;
  Epilogue epilogue;
  DType dtype;      // of x, weight, bias
  DType out_dtype;  // dtype, or kFloat32 (logits)
  // Chains that K is cut into: linear_chunks() of the shape where the kernel for Hopper takes the
  // weight, 1 elsewhere.
  int64_t num_chunks = 1;
  // [num_chunks, num_tokens, n] out: the chains' sums, left for the next kernel to add; out, bias
  // and epilogue are then not looked at. Null: added here.
  float* partials = nullptr;
  // The first half of x's RMSNorm is done, this is for the second: [num_tokens, k / kNormColumns].
  // Each output is multiplied by 1 / sqrt(sum of its row's / k + eps), before the bias. May be
  // null.
  const float* square_sums = nullptr;
  float eps = 0;
  // kResidual: the first half of the next RMSNorm, over the new rows of out. Null: there is none.
  const void* norm_weight = nullptr;  // [n]
  void* weighted = nullptr;           // [num_tokens, n], contiguous: out * norm_weight
  float* new_square_sums = nullptr;   // [num_tokens, n / kNormColumns]
  RopeKvTo rope = {};                 // for kRopeKv
  LeadersTo leaders = {};             // of a plain product in one chain to float32
};

// The first half of an RMSNorm by itself (see kNormColumns), after residual += x where x is given
// as a product's partial sums, or after residual = embedding.
struct WeighRowsParams {
  void* weighted;         // [num_rows, hidden_size]: residual * weight, rounded
  float* square_sums;     // [num_rows, hidden_size / kNormColumns]
  void* residual;         // [num_rows, hidden_size], contiguous; written where it changes
  const void* weight;     // [hidden_size]
  const float* partials;  // [num_partials, num_rows, hidden_size], added in order; may be null
  int64_t num_partials, num_rows, hidden_size;
  DType dtype;
  // Where its out, which is residual, is not null, the rows come from there; then no partials.
  EmbeddingParams embedding = {};
};

namespace cuda {
void embedding(const EmbeddingParams& p, Stream stream);
void rms_norm(const RmsNormParams& p, Stream stream);
void rope_kv(const RopeKvParams& p, Stream stream);
void prefill_attention(const AttentionParams& p, Stream stream);
void decode_attention(const AttentionParams& p, Stream stream);
int64_t attention_workspace_size(int64_t max_seqs, int64_t max_seq_len, int64_t num_q_heads,
                                 int64_t head_dim);
void silu_mul(const SiluMulParams& p, Stream stream);
// Does the kernel for Hopper take this product on this card? Others take what it does not.
bool linear_uses_wgmma(const LinearParams& p);
// How many chains that kernel cuts a product of this shape into, whatever the number of tokens.
int64_t linear_chunks(int64_t n, int64_t k, Epilogue epilogue);
void weigh_rows(const WeighRowsParams& p, Stream stream);
void linear(const LinearParams& p, Stream stream);
void update_state(const UpdateStateParams& p, Stream stream);
void copy_words(const CopyWordsParams& p, Stream stream);
void sample(const SampleParams& p, Stream stream);
int64_t sample_workspace_size(int64_t max_rows, int64_t vocab_size);
void logprobs(const LogprobsParams& p, Stream stream);
void count_tokens(const CountTokensParams& p, Stream stream);
}  // namespace cuda

namespace cpu {
void embedding(const EmbeddingParams& p);
void rms_norm(const RmsNormParams& p);
void rope_kv(const RopeKvParams& p);
void prefill_attention(const AttentionParams& p);
void decode_attention(const AttentionParams& p);
void silu_mul(const SiluMulParams& p);
int64_t packed_weight_size(int64_t n, int64_t k, DType dtype);  // in elements
void pack_weight(void* packed, const void* weight, int64_t n, int64_t k, DType dtype);
void linear(const LinearParams& p);
void update_state(const UpdateStateParams& p);
void sample(const SampleParams& p);
void logprobs(const LogprobsParams& p);
void count_tokens(const CountTokensParams& p);
}  // namespace cpu

}  // namespace minivllm
