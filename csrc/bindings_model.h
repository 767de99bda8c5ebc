// The bindings of a decoder's operations but its products. Part of bindings.cpp.
#pragma once

#include "bindings_checks.h"

namespace minivllm::bindings {

inline EmbeddingParams embedding_of(const Tensor& out, const Tensor& weight,
                                    const Tensor& token_ids, const OptionalTensor& slots,
                                    const OptionalTensor& last_tokens, bool first) {
  const int64_t num_tokens = token_ids.numel();
  CHECK_DENSE(weight, weight.scalar_type(), weight);
  if (weight.dim() != 2) fail("weight must have the shape [vocab_size, hidden_size]");
  const int64_t hidden_size = weight.size(1);
  CHECK_DENSE(token_ids, at::kInt, weight);
  CHECK_SHAPE(token_ids, num_tokens);
  CHECK_DENSE(out, weight.scalar_type(), weight);
  CHECK_SHAPE(out, num_tokens, hidden_size);
  if (last_tokens.has_value()) {
    if (!slots.has_value()) fail("last_tokens needs slots");
    check_kind(*last_tokens, "last_tokens", at::kInt, weight);
    if (last_tokens->dim() != 1) fail("last_tokens must have the shape [num_slots]");
    check_dense(*slots, "slots", at::kInt, weight);
    check_shape(*slots, "slots", "num_tokens", {num_tokens});
  }
  return {out.data_ptr(),
          weight.data_ptr(),
          ints(token_ids),
          data_or_null<int32_t>(slots),
          data_or_null<int32_t>(last_tokens),
          last_tokens.has_value() ? last_tokens->stride(0) : 0,
          num_tokens,
          hidden_size,
          weight.size(0),
          dtype_of(weight, "weight"),
          first};
}

inline void embedding(const Tensor& out, const Tensor& weight, const Tensor& token_ids,
                      const OptionalTensor& slots, const OptionalTensor& last_tokens, bool first) {
  const EmbeddingParams p = embedding_of(out, weight, token_ids, slots, last_tokens, first);
  LAUNCH(embedding, weight, p);
}

// The sums that linear left for the kernel after it: [num_partials, rows, columns].
inline const float* partial_sums(const OptionalTensor& partials, int64_t rows, int64_t columns,
                                 const Tensor& like, int64_t& num_partials) {
  num_partials = 0;
  if (!partials.has_value()) return nullptr;
  if (!like.is_cuda()) fail("partials are for CUDA tensors");
  check_dense(*partials, "partials", at::kFloat, like);
  num_partials = partials->size(0);
  check_shape(*partials, "partials", "num_partials, rows, columns", {num_partials, rows, columns});
  return static_cast<const float*>(partials->data_ptr());
}

inline void rms_norm(const Tensor& out, const Tensor& x, const Tensor& weight, double eps,
                     const OptionalTensor& residual, const OptionalTensor& partials) {
  CHECK_ROWS(x, x.scalar_type(), x);
  const int64_t num_rows = x.size(0), hidden_size = x.size(1);
  CHECK_DENSE(weight, x.scalar_type(), x);
  CHECK_SHAPE(weight, hidden_size);
  CHECK_DENSE(out, x.scalar_type(), x);
  CHECK_SHAPE(out, num_rows, hidden_size);
  if (residual.has_value()) {
    check_dense(*residual, "residual", x.scalar_type(), x);
    check_shape(*residual, "residual", "num_rows, hidden_size", {num_rows, hidden_size});
  }
  if (partials.has_value() && !residual.has_value()) fail("partials need a residual");
  int64_t num_partials = 0;
  const float* sums = partial_sums(partials, num_rows, hidden_size, x, num_partials);
  const RmsNormParams p{
      out.data_ptr(), x.data_ptr(),  data_or_null(residual),  weight.data_ptr(), num_rows,
      hidden_size,    row_stride(x), static_cast<float>(eps), dtype_of(x, "x"),  sums,
      num_partials};
  LAUNCH(rms_norm, x, p);
}

// A row's square sums, one for kNormColumns columns: [rows, columns / kNormColumns].
inline void check_square_sums(const Tensor& square_sums, const char* name, int64_t rows,
                              int64_t columns, const Tensor& like) {
  if (columns % kNormColumns != 0) {
    fail("rows of ", columns, " columns have no ", name, ": they are of ", kNormColumns,
         " columns each");
  }
  check_dense(square_sums, name, at::kFloat, like);
  check_shape(square_sums, name, "rows, columns / 64", {rows, columns / kNormColumns});
}

inline WeighRowsParams weigh_rows_of(const Tensor& weighted, const Tensor& square_sums,
                                     const Tensor& residual, const Tensor& weight,
                                     const char* weight_name, const OptionalTensor& partials) {
  CHECK_DENSE(residual, residual.scalar_type(), residual);
  if (residual.dim() != 2) fail("residual must have the shape [num_rows, hidden_size]");
  const int64_t num_rows = residual.size(0), hidden_size = residual.size(1);
  check_dense(weight, weight_name, residual.scalar_type(), residual);
  check_shape(weight, weight_name, "hidden_size", {hidden_size});
  CHECK_DENSE(weighted, residual.scalar_type(), residual);
  CHECK_SHAPE(weighted, num_rows, hidden_size);
  check_square_sums(square_sums, "square_sums", num_rows, hidden_size, residual);
  int64_t num_partials = 0;
  const float* sums = partial_sums(partials, num_rows, hidden_size, residual, num_partials);
  return {weighted.data_ptr(),
          static_cast<float*>(square_sums.data_ptr()),
          residual.data_ptr(),
          weight.data_ptr(),
          sums,
          num_partials,
          num_rows,
          hidden_size,
          dtype_of(residual, "residual")};
}

// The first half of an RMSNorm for the product after it; residual is written where there are
// partials.
inline void weigh_rows(const Tensor& weighted, const Tensor& square_sums, const Tensor& residual,
                       const Tensor& weight, const OptionalTensor& partials) {
  check_on_cuda(residual, "weigh_rows");
  const WeighRowsParams p =
      weigh_rows_of(weighted, square_sums, residual, weight, "weight", partials);
  LAUNCH_CUDA(weigh_rows, residual, p);
}

// The same of rows that are looked up first; residual is written.
inline void embed_and_weigh(const Tensor& weighted, const Tensor& square_sums,
                            const Tensor& residual, const Tensor& norm_weight, const Tensor& weight,
                            const Tensor& token_ids, const OptionalTensor& slots,
                            const OptionalTensor& last_tokens, bool first) {
  check_on_cuda(residual, "embed_and_weigh");
  WeighRowsParams p =
      weigh_rows_of(weighted, square_sums, residual, norm_weight, "norm_weight", OptionalTensor());
  p.embedding = embedding_of(residual, weight, token_ids, slots, last_tokens, first);
  LAUNCH_CUDA(weigh_rows, residual, p);
}

inline KvCache kv_cache_of(const Tensor& kv_cache, const Tensor& block_table, const Tensor& like) {
  CHECK_DENSE(kv_cache, like.scalar_type(), like);
  if (kv_cache.dim() != 5 || kv_cache.size(1) != 2) {
    fail("kv_cache must have the shape [num_blocks, 2, num_kv_heads, block_size, head_dim], not ",
         kv_cache.sizes());
  }
  CHECK_ROWS(block_table, at::kInt, like);
  return {kv_cache.data_ptr(), ints(block_table), row_stride(block_table), kv_cache.size(0),
          block_table.size(1), kv_cache.size(2),  kv_cache.size(3),        kv_cache.size(4)};
}

inline void rope_kv(const Tensor& q_out, const Tensor& qkv, const Tensor& cos_sin,
                    const Tensor& positions, const Tensor& slots, const Tensor& block_table,
                    const Tensor& kv_cache, const OptionalTensor& q_norm,
                    const OptionalTensor& k_norm, double eps, const OptionalTensor& square_sums,
                    bool settled) {
  const bool in_parts = qkv.dim() == 3;  // the sums that linear left
  if (!in_parts) CHECK_ROWS(qkv, q_out.scalar_type(), q_out);
  const KvCache kv = kv_cache_of(kv_cache, block_table, q_out);
  const int64_t num_tokens = qkv.size(-2), head_dim = kv.head_dim;
  const int64_t num_q_heads = qkv.size(-1) / head_dim - 2 * kv.num_kv_heads;
  const int64_t qkv_size = (num_q_heads + 2 * kv.num_kv_heads) * head_dim;
  if (num_q_heads <= 0) fail("qkv has no room for query heads: ", qkv.sizes());
  int64_t num_partials = 0;
  const float* sums = partial_sums(in_parts ? OptionalTensor(qkv) : OptionalTensor(), num_tokens,
                                   qkv_size, q_out, num_partials);
  if (!in_parts) CHECK_SHAPE(qkv, num_tokens, qkv_size);
  CHECK_DENSE(q_out, q_out.scalar_type(), q_out);
  CHECK_SHAPE(q_out, num_tokens, num_q_heads, head_dim);
  CHECK_DENSE(cos_sin, at::kFloat, qkv);
  const int64_t max_position = cos_sin.size(0);
  CHECK_SHAPE(cos_sin, max_position, head_dim);
  CHECK_DENSE(positions, at::kInt, qkv);
  CHECK_SHAPE(positions, num_tokens);
  CHECK_DENSE(slots, at::kInt, qkv);
  CHECK_SHAPE(slots, num_tokens);
  for (const OptionalTensor* norm : {&q_norm, &k_norm}) {
    if (!norm->has_value()) continue;
    check_dense(**norm, "q_norm and k_norm", q_out.scalar_type(), qkv);
    check_shape(**norm, "q_norm and k_norm", "head_dim", {head_dim});
  }
  RopeKvParams p{q_out.data_ptr(),
                 qkv.data_ptr(),
                 in_parts ? 0 : row_stride(qkv),
                 static_cast<const float*>(cos_sin.data_ptr()),
                 max_position,
                 ints(positions),
                 ints(slots),
                 data_or_null(q_norm),
                 data_or_null(k_norm),
                 static_cast<float>(eps),
                 num_tokens,
                 num_q_heads,
                 kv,
                 dtype_of(q_out, "q_out"),
                 sums,
                 num_partials};
  if (square_sums.has_value()) {
    if (!in_parts) fail("square_sums are for a product's partial sums");
    if (q_norm.has_value() || k_norm.has_value()) fail("square_sums leave no norm of each head");
    check_dense(*square_sums, "square_sums", at::kFloat, qkv);
    if (square_sums->dim() != 2) fail("square_sums must have the shape [num_tokens, count]");
    const int64_t count = square_sums->size(1);
    check_shape(*square_sums, "square_sums", "num_tokens, count", {num_tokens, count});
    if (count == 0) fail("square_sums must have columns");
    p.square_sums = static_cast<const float*>(square_sums->data_ptr());
    p.num_square_sums = count;
  }
  p.settled = settled;
  LAUNCH(rope_kv, qkv, p);
}

inline AttentionParams attention_params(const Tensor& out, const Tensor& q, const Tensor& kv_cache,
                                        const Tensor& block_table, const Tensor& slots,
                                        const Tensor& seq_lens, int64_t max_q_len,
                                        int64_t max_seq_len, double scale) {
  CHECK_DENSE(q, q.scalar_type(), q);
  const KvCache kv = kv_cache_of(kv_cache, block_table, q);
  if (q.dim() != 3) fail("q must have the shape [num_tokens, num_q_heads, head_dim]");
  const int64_t num_tokens = q.size(0), num_q_heads = q.size(1), head_dim = kv.head_dim;
  CHECK_SHAPE(q, num_tokens, num_q_heads, head_dim);
  CHECK_DENSE(out, q.scalar_type(), q);
  CHECK_SHAPE(out, num_tokens, num_q_heads, head_dim);
  const int64_t num_seqs = slots.numel();
  CHECK_DENSE(slots, at::kInt, q);
  CHECK_SHAPE(slots, num_seqs);
  CHECK_DENSE(seq_lens, at::kInt, q);
  CHECK_SHAPE(seq_lens, num_seqs);
  if (num_q_heads % kv.num_kv_heads != 0) {
    fail("num_q_heads = ", num_q_heads, " is no multiple of num_kv_heads = ", kv.num_kv_heads);
  }
  return {out.data_ptr(),
          q.data_ptr(),
          ints(slots),
          ints(seq_lens),
          nullptr,
          num_seqs,
          num_tokens,
          num_q_heads,
          max_q_len,
          max_seq_len,
          static_cast<float>(scale),
          nullptr,
          kv,
          dtype_of(q, "q")};
}

inline void prefill_attention(const Tensor& out, const Tensor& q, const Tensor& kv_cache,
                              const Tensor& block_table, const Tensor& slots,
                              const Tensor& seq_lens, const Tensor& q_starts, int64_t max_q_len,
                              int64_t max_seq_len, double scale) {
  AttentionParams p = attention_params(out, q, kv_cache, block_table, slots, seq_lens, max_q_len,
                                       max_seq_len, scale);
  CHECK_DENSE(q_starts, at::kInt, q);
  const int64_t num_seqs_and_one = p.num_seqs + 1;
  CHECK_SHAPE(q_starts, num_seqs_and_one);
  p.q_starts = ints(q_starts);
  LAUNCH(prefill_attention, q, p);
}

inline void decode_attention(const Tensor& out, const Tensor& q, const Tensor& kv_cache,
                             const Tensor& block_table, const Tensor& slots, const Tensor& seq_lens,
                             int64_t max_seq_len, double scale, const OptionalTensor& workspace,
                             bool settled) {
  AttentionParams p =
      attention_params(out, q, kv_cache, block_table, slots, seq_lens, 1, max_seq_len, scale);
  if (p.num_tokens != p.num_seqs) fail("decode needs one row of q a sequence");
  p.workspace = data_or_null(workspace);
  p.settled = settled;
  LAUNCH(decode_attention, q, p);
}

inline void silu_mul(const Tensor& out, const Tensor& x) {
  CHECK_ROWS(x, x.scalar_type(), x);
  const int64_t num_tokens = x.size(0), size = x.size(1) / 2, two_sizes = 2 * size;
  CHECK_SHAPE(x, num_tokens, two_sizes);
  CHECK_DENSE(out, x.scalar_type(), x);
  CHECK_SHAPE(out, num_tokens, size);
  const SiluMulParams p{out.data_ptr(), x.data_ptr(),  num_tokens,
                        size,           row_stride(x), dtype_of(x, "x")};
  LAUNCH(silu_mul, x, p);
}

// Bytes of the workspace of decode_attention; 0 on the CPU, which needs none.
inline int64_t attention_workspace_size([[maybe_unused]] int64_t max_seqs,
                                        [[maybe_unused]] int64_t max_seq_len,
                                        [[maybe_unused]] int64_t num_q_heads,
                                        [[maybe_unused]] int64_t head_dim) {
#ifdef MINIVLLM_WITH_CUDA
  return cuda::attention_workspace_size(max_seqs, max_seq_len, num_q_heads, head_dim);
#else
  return 0;
#endif
}

}  // namespace minivllm::bindings
