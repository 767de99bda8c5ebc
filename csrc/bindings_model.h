// The bindings of a decoder's operations. Part of bindings.cpp.
#pragma once

#include "bindings_checks.h"

namespace minivllm::bindings {

inline void embedding(const Tensor& out, const Tensor& weight, const Tensor& token_ids,
                      const OptionalTensor& slots, const OptionalTensor& last_tokens) {
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
  const EmbeddingParams p{out.data_ptr(),
                          weight.data_ptr(),
                          ints(token_ids),
                          data_or_null<int32_t>(slots),
                          data_or_null<int32_t>(last_tokens),
                          last_tokens.has_value() ? last_tokens->stride(0) : 0,
                          num_tokens,
                          hidden_size,
                          weight.size(0),
                          dtype_of(weight, "weight")};
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
                    const OptionalTensor& k_norm, double eps) {
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
  const RopeKvParams p{q_out.data_ptr(),
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
                             int64_t max_seq_len, double scale, const OptionalTensor& workspace) {
  AttentionParams p =
      attention_params(out, q, kv_cache, block_table, slots, seq_lens, 1, max_seq_len, scale);
  if (p.num_tokens != p.num_seqs) fail("decode needs one row of q a sequence");
  p.workspace = data_or_null(workspace);
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

// weight is [n, k] on CUDA and packed on the CPU.
inline void linear(const Tensor& out, const Tensor& x, const Tensor& weight, int64_t n,
                   const OptionalTensor& bias, int64_t epilogue, int64_t num_chunks) {
  CHECK_ROWS(x, x.scalar_type(), x);
  const int64_t num_tokens = x.size(0), k = x.size(1);
  const bool in_parts = out.dim() == 3;  // the chains' sums stay apart
  const DType dtype = dtype_of(x, "x");
  CHECK_DENSE(weight, x.scalar_type(), x);
  if (x.is_cuda()) {
    CHECK_SHAPE(weight, n, k);
  } else {
    const int64_t packed_size = cpu::packed_weight_size(n, k, dtype);
    CHECK_SHAPE(weight, packed_size);
  }
  if (epilogue < 0 || epilogue > 2) fail("epilogue must be 0, 1 or 2");
  const Epilogue kind = static_cast<Epilogue>(epilogue);
  const int64_t out_size = kind == Epilogue::kSiluMul ? n / 2 : n;
  const DType out_dtype = dtype_of(out, "out");
  int64_t num_partials = 0;
  if (in_parts) {
    if (bias.has_value()) fail("a product with a bias adds its chains itself");
    partial_sums(out, num_tokens, n, x, num_partials);
    if (num_partials != num_chunks) fail("out has ", num_partials, " parts of ", num_chunks);
  } else {
    CHECK_ROWS(out, out_dtype == DType::kFloat32 ? at::kFloat : x.scalar_type(), x);
    CHECK_SHAPE(out, num_tokens, out_size);
  }
  if (bias.has_value()) {
    check_dense(*bias, "bias", x.scalar_type(), x);
    check_shape(*bias, "bias", "n", {n});
  }
  const LinearParams p{out.data_ptr(),
                       x.data_ptr(),
                       weight.data_ptr(),
                       data_or_null(bias),
                       num_tokens,
                       n,
                       k,
                       row_stride(x),
                       in_parts ? n : row_stride(out),
                       kind,
                       dtype,
                       out_dtype,
                       num_chunks,
                       in_parts ? static_cast<float*>(out.data_ptr()) : nullptr};
  LAUNCH(linear, x, p);
}

inline int64_t packed_weight_size(const Tensor& weight) {
  if (weight.dim() != 2) fail("weight must have the shape [n, k]");
  return cpu::packed_weight_size(weight.size(0), weight.size(1), dtype_of(weight, "weight"));
}

inline void pack_weight(const Tensor& packed, const Tensor& weight) {
  CHECK_DENSE(weight, weight.scalar_type(), weight);
  check_on_cpu(weight);
  const DType dtype = dtype_of(weight, "weight");
  const int64_t packed_size = packed_weight_size(weight);
  CHECK_DENSE(packed, weight.scalar_type(), weight);
  CHECK_SHAPE(packed, packed_size);
  cpu::pack_weight(packed.data_ptr(), weight.data_ptr(), weight.size(0), weight.size(1), dtype);
}

// Does the kernel for Hopper take products with this weight? False elsewhere.
inline bool linear_uses_wgmma([[maybe_unused]] const Tensor& weight,
                              [[maybe_unused]] int64_t epilogue) {
#ifdef MINIVLLM_WITH_CUDA
  if (weight.is_cuda() && weight.dim() == 2) {
    const c10::cuda::CUDAGuard guard(weight.device());
    LinearParams p{};
    p.weight = weight.data_ptr();
    p.num_tokens = 1;
    p.n = weight.size(0);
    p.k = p.x_stride = weight.size(1);
    p.epilogue = static_cast<Epilogue>(epilogue);
    p.out_stride = p.epilogue == Epilogue::kSiluMul ? p.n / 2 : p.n;
    p.dtype = p.out_dtype = dtype_of(weight, "weight");
    return cuda::linear_uses_wgmma(p);
  }
#endif
  return false;
}

// Chains that a product is cut into on the weight's device: 1 but on Hopper.
inline int64_t linear_chunks([[maybe_unused]] const Tensor& weight,
                             [[maybe_unused]] int64_t epilogue) {
#ifdef MINIVLLM_WITH_CUDA
  if (linear_uses_wgmma(weight, epilogue)) {
    return cuda::linear_chunks(weight.size(0), weight.size(1), static_cast<Epilogue>(epilogue));
  }
#endif
  return 1;
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
