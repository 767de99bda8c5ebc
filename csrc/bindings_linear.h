// The bindings of a decoder's matrix products. Part of bindings.cpp.
#pragma once

#include "bindings_model.h"

namespace minivllm::bindings {

// What all products have: [num_tokens, k] times [n, k] transposed. out is for the caller to check.
// weight is [n, k] on CUDA and packed on the CPU.
inline LinearParams linear_params(const Tensor& out, const Tensor& x, const Tensor& weight,
                                  int64_t n, const OptionalTensor& bias, Epilogue epilogue,
                                  int64_t num_chunks) {
  CHECK_ROWS(x, x.scalar_type(), x);
  const int64_t num_tokens = x.size(0), k = x.size(1);
  const DType dtype = dtype_of(x, "x");
  CHECK_DENSE(weight, x.scalar_type(), x);
  if (x.is_cuda()) {
    CHECK_SHAPE(weight, n, k);
  } else {
    const int64_t packed_size = cpu::packed_weight_size(n, k, dtype);
    CHECK_SHAPE(weight, packed_size);
  }
  if (bias.has_value()) {
    check_dense(*bias, "bias", x.scalar_type(), x);
    check_shape(*bias, "bias", "n", {n});
  }
  LinearParams p{};
  p.out = out.data_ptr();
  p.x = x.data_ptr();
  p.weight = weight.data_ptr();
  p.bias = data_or_null(bias);
  p.num_tokens = num_tokens;
  p.n = n;
  p.k = k;
  p.x_stride = row_stride(x);
  p.epilogue = epilogue;
  p.dtype = p.out_dtype = dtype;
  p.num_chunks = num_chunks;
  return p;
}

// Parts of a layer are for few tokens, but for the first half of a norm where K is cut.
inline void check_few(const LinearParams& p) {
  if (p.num_tokens > kMostFusedTokens)
    fail("there are ", p.num_tokens, " tokens, which is more than ", kMostFusedTokens);
}

// Halves of norms and rope are the business of the kernel for Hopper: others would leave them out.
inline void check_uses_wgmma([[maybe_unused]] const LinearParams& p,
                             [[maybe_unused]] const Tensor& x) {
#ifdef MINIVLLM_WITH_CUDA
  const c10::cuda::CUDAGuard guard(x.device());
  if (cuda::linear_uses_wgmma(p)) return;
  fail(
      "products with half a norm, rope or leaders are for the kernel for Hopper, which does not "
      "take ",
      "this one: out is [", p.num_tokens, ", ", p.n, "], k is ", p.k, ", x is ", x.scalar_type());
#endif
}

inline void use_square_sums(LinearParams& p, const Tensor& square_sums, double eps,
                            const Tensor& x) {
  check_square_sums(square_sums, "square_sums", p.num_tokens, p.k, x);
  p.square_sums = static_cast<const float*>(square_sums.data_ptr());
  p.eps = static_cast<float>(eps);
}

inline void linear(const Tensor& out, const Tensor& x, const Tensor& weight, int64_t n,
                   const OptionalTensor& bias, int64_t epilogue, int64_t num_chunks,
                   const OptionalTensor& square_sums, double eps) {
  if (epilogue < 0 || epilogue > 2) fail("epilogue must be 0, 1 or 2");
  const Epilogue kind = static_cast<Epilogue>(epilogue);
  LinearParams p = linear_params(out, x, weight, n, bias, kind, num_chunks);
  p.out_dtype = dtype_of(out, "out");
  if (out.dim() == 3) {  // the chains' sums stay apart
    if (bias.has_value()) fail("a product with a bias adds its chains itself");
    if (square_sums.has_value()) fail("a product with square_sums adds its chains itself");
    int64_t num_partials = 0;
    partial_sums(out, p.num_tokens, n, x, num_partials);
    if (num_partials != num_chunks) fail("out has ", num_partials, " parts of ", num_chunks);
    p.out_stride = n;
    p.partials = static_cast<float*>(out.data_ptr());
  } else {
    const int64_t num_tokens = p.num_tokens, out_size = kind == Epilogue::kSiluMul ? n / 2 : n;
    CHECK_ROWS(out, p.out_dtype == DType::kFloat32 ? at::kFloat : x.scalar_type(), x);
    CHECK_SHAPE(out, num_tokens, out_size);
    p.out_stride = row_stride(out);
  }
  if (square_sums.has_value()) {
    check_on_cuda(x, "a product with square_sums");
    use_square_sums(p, *square_sums, eps, x);
    check_uses_wgmma(p, x);
  }
  LAUNCH(linear, x, p);
}

// Logits, or where a row's slot has kLeaderSuffices perhaps none, and their leaders.
inline void linear_leaders(const Tensor& logits, const Tensor& leaders, const Tensor& x,
                           const Tensor& weight, const OptionalTensor& bias, int64_t num_chunks,
                           const Tensor& slots, const Tensor& state,
                           const OptionalTensor& square_sums, double eps) {
  check_on_cuda(x, "linear_leaders");
  CHECK_ROWS(logits, at::kFloat, x);
  const int64_t n = logits.size(1);
  LinearParams p = linear_params(logits, x, weight, n, bias, Epilogue::kNone, num_chunks);
  const int64_t num_tokens = p.num_tokens;
  CHECK_SHAPE(logits, num_tokens, n);
  check_leaders(leaders, num_tokens, n, x);
  CHECK_DENSE(slots, at::kInt, x);
  CHECK_SHAPE(slots, num_tokens);
  check_state(state, x);
  p.out_dtype = DType::kFloat32;
  p.out_stride = row_stride(logits);
  p.leaders = {static_cast<uint64_t*>(leaders.data_ptr()), ints(slots), ints(state),
               row_stride(state)};
  if (square_sums.has_value()) use_square_sums(p, *square_sums, eps, x);
  check_uses_wgmma(p, x);
  LAUNCH_CUDA(linear, x, p);
}

// residual += x W^T + bias, and the first half of the RMSNorm of its new rows.
inline void linear_residual_norm(const Tensor& residual, const Tensor& weighted,
                                 const Tensor& new_square_sums, const Tensor& x,
                                 const Tensor& weight, const Tensor& norm_weight,
                                 const OptionalTensor& bias, int64_t num_chunks) {
  check_on_cuda(x, "linear_residual_norm");
  CHECK_ROWS(residual, x.scalar_type(), x);
  const int64_t n = residual.size(1);
  LinearParams p = linear_params(residual, x, weight, n, bias, Epilogue::kResidual, num_chunks);
  const int64_t num_tokens = p.num_tokens;
  CHECK_SHAPE(residual, num_tokens, n);
  CHECK_DENSE(weighted, x.scalar_type(), x);
  CHECK_SHAPE(weighted, num_tokens, n);
  check_square_sums(new_square_sums, "new_square_sums", num_tokens, n, x);
  CHECK_DENSE(norm_weight, x.scalar_type(), x);
  CHECK_SHAPE(norm_weight, n);
  p.out_stride = row_stride(residual);
  p.norm_weight = norm_weight.data_ptr();
  p.weighted = weighted.data_ptr();
  p.new_square_sums = static_cast<float*>(new_square_sums.data_ptr());
  if (num_chunks == 1 || bias.has_value()) check_few(p);
  check_uses_wgmma(p, x);
  LAUNCH_CUDA(linear, x, p);
}

// Queries, keys and values of rows whose norm is half done: queries to q, rotated, keys, rotated,
// and values to their blocks.
inline void linear_rope_kv(const Tensor& q, const Tensor& x, const Tensor& square_sums, double eps,
                           const Tensor& weight, const OptionalTensor& bias, int64_t num_chunks,
                           const Tensor& cos_sin, const Tensor& positions, const Tensor& slots,
                           const Tensor& block_table, const Tensor& kv_cache, bool settled) {
  check_on_cuda(x, "linear_rope_kv");
  constexpr int64_t kHeadDim = 64;
  const KvCache kv = kv_cache_of(kv_cache, block_table, x);
  if (kv.head_dim != kHeadDim) fail("head_dim must be ", kHeadDim, ", not ", kv.head_dim);
  if (weight.dim() != 2) fail("weight must have the shape [n, k]");
  const int64_t n = weight.size(0), head_dim = kv.head_dim;
  const int64_t num_q_heads = n / head_dim - 2 * kv.num_kv_heads;
  if (num_q_heads <= 0 || n % head_dim != 0) {
    fail("weight has no room for query heads, or for parts of heads: ", weight.sizes());
  }
  LinearParams p = linear_params(q, x, weight, n, bias, Epilogue::kRopeKv, num_chunks);
  const int64_t num_tokens = p.num_tokens, max_position = cos_sin.size(0);
  CHECK_DENSE(q, x.scalar_type(), x);
  CHECK_SHAPE(q, num_tokens, num_q_heads, head_dim);
  CHECK_DENSE(cos_sin, at::kFloat, x);
  CHECK_SHAPE(cos_sin, max_position, head_dim);
  CHECK_DENSE(positions, at::kInt, x);
  CHECK_SHAPE(positions, num_tokens);
  CHECK_DENSE(slots, at::kInt, x);
  CHECK_SHAPE(slots, num_tokens);
  use_square_sums(p, square_sums, eps, x);
  check_few(p);
  p.out_stride = num_q_heads * head_dim;
  p.rope = {static_cast<const float*>(cos_sin.data_ptr()),
            max_position,
            ints(positions),
            ints(slots),
            num_q_heads,
            kv,
            settled};
  check_uses_wgmma(p, x);
  LAUNCH_CUDA(linear, x, p);
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

}  // namespace minivllm::bindings
