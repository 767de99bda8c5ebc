// Paged attention: https://arxiv.org/abs/2205.14135 (online softmax),
// https://arxiv.org/abs/2309.06180 (blocks). Prefill and decode are one function.
#include <cmath>

#include "parallel.h"
#include "types.h"

namespace minivllm::cpu {

// The work of one thread at a time: rows [row_begin, row_end) of a sequence and a key head, where
// row = token in the sequence's new tokens * (query heads a key head) + query head.
struct AttentionItem {
  int64_t seq, kv_head;
  int64_t first_token;     // row of q at which the sequence starts
  int64_t first_position;  // that token's position
  int64_t row_begin, row_end;
};

constexpr int64_t kTileKeys = 64;     // reduced at a time
constexpr int64_t kItemRows = 32;     // rows that share a tile
constexpr int64_t kMaxHeadDim = 256;  // what the buffers on the stack hold
// Below this many products of q and k, waking a thread costs more than it saves.
constexpr int64_t kSmallProducts = 1 << 16;

}  // namespace minivllm::cpu

#define MINIVLLM_KERNELS "attention_kernels.h"
#include "each_isa.h"

namespace minivllm::cpu {

void prefill_attention(const AttentionParams& p) {
  if (p.kv.head_dim % 8 != 0 || p.kv.head_dim > kMaxHeadDim) {
    throw std::invalid_argument("attention: head_dim must be a multiple of 8 up to 256");
  }
  if (p.num_q_heads % p.kv.num_kv_heads != 0) {
    throw std::invalid_argument("attention: the query heads must be a multiple of the KV heads");
  }
  const auto kernel = MINIVLLM_SELECT(attend);
  const int64_t group = p.num_q_heads / p.kv.num_kv_heads;
  const int64_t max_items = ceil_div(p.max_q_len * group, kItemRows);
  const int64_t per_item_index = p.num_seqs * p.kv.num_kv_heads;
  int64_t num_keys = 0;
  for (int64_t s = 0; s < p.num_seqs; ++s) num_keys += p.slots[s] >= 0 ? p.seq_lens[s] : 0;
  const bool small = num_keys * p.max_q_len * p.num_q_heads * p.kv.head_dim < kSmallProducts;
  // The last rows of a sequence see the most keys, so they start first.
  parallel_items(max_items * per_item_index, !small, [&](int64_t i) {
    AttentionItem item;
    item.seq = i % per_item_index / p.kv.num_kv_heads;
    item.kv_head = i % p.kv.num_kv_heads;
    item.row_begin = (max_items - 1 - i / per_item_index) * kItemRows;
    item.first_token = p.q_starts != nullptr ? p.q_starts[item.seq] : item.seq;
    const int64_t num_tokens =
        p.q_starts != nullptr ? p.q_starts[item.seq + 1] - item.first_token : 1;
    item.row_end = num_tokens * group;
    if (p.slots[item.seq] < 0 || item.row_begin >= item.row_end) return;
    if (item.row_end > item.row_begin + kItemRows) item.row_end = item.row_begin + kItemRows;
    item.first_position = p.seq_lens[item.seq] - num_tokens;
    kernel(p, item);
  });
}

void decode_attention(const AttentionParams& p) {
  AttentionParams one_row = p;
  one_row.q_starts = nullptr;
  one_row.max_q_len = 1;
  prefill_attention(one_row);
}

}  // namespace minivllm::cpu
