// The bindings of the slots' state and of sampling. Part of bindings.cpp.
#pragma once

#include <set>

#include "bindings_checks.h"

namespace minivllm::bindings {

inline void update_state(const Tensor& state, const Tensor& pairs) {
  CHECK_DENSE(state, at::kInt, state);
  CHECK_DENSE(pairs, at::kInt, state);
  const int64_t num_pairs = pairs.size(0), two = 2;
  CHECK_SHAPE(pairs, num_pairs, two);
  const UpdateStateParams p{static_cast<int32_t*>(state.data_ptr()), ints(pairs), num_pairs,
                            state.numel()};
  LAUNCH(update_state, state, p);
}

// Between the device and pinned memory of the host.
inline void copy_words(const Tensor& to, const Tensor& from) {
  const Tensor& device = to.is_cuda() ? to : from;
  const Tensor& host = to.is_cuda() ? from : to;
  check_on_cuda(device, "copy_words");
  if (!host.is_cpu() || !host.is_pinned()) fail("one of both must be in pinned memory of the host");
  for (const Tensor* t : {&to, &from}) {
    if (t->scalar_type() != at::kInt || !t->is_contiguous()) fail("words are int32, contiguous");
  }
  if (to.numel() != from.numel()) fail("to has ", to.numel(), " words, from ", from.numel());
  const CopyWordsParams p{static_cast<int32_t*>(to.data_ptr()), ints(from), to.numel()};
  LAUNCH_CUDA(copy_words, device, p);
}

inline void sample(const Tensor& tokens, const Tensor& logits, const Tensor& slots,
                   const Tensor& positions, const Tensor& state, const OptionalTensor& counts,
                   const OptionalTensor& bias_ids, const OptionalTensor& bias_values,
                   const OptionalTensor& bias_until, const OptionalTensor& workspace,
                   const OptionalTensor& leaders, bool settled, const OptionalTensor& token_ids,
                   const OptionalTensor& step_positions, const OptionalTensor& turns,
                   const OptionalTensor& host_tokens) {
  CHECK_ROWS(logits, at::kFloat, logits);
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  CHECK_DENSE(slots, at::kInt, logits);
  CHECK_SHAPE(slots, num_rows);
  CHECK_DENSE(positions, at::kInt, logits);
  CHECK_SHAPE(positions, num_rows);
  CHECK_DENSE(tokens, at::kInt, logits);
  CHECK_SHAPE(tokens, num_rows);
  check_state(state, logits);
  const int64_t num_slots = state.size(0);
  if (counts.has_value()) {
    check_dense(*counts, "counts", at::kInt, logits);
    check_shape(*counts, "counts", "num_slots, vocab_size", {num_slots, vocab_size});
  }
  const int64_t max_bias = bias_ids.has_value() ? bias_ids->size(-1) : 0;
  if (bias_ids.has_value()) {
    if (!bias_values.has_value() || !bias_until.has_value()) fail("bias needs its three parts");
    check_dense(*bias_ids, "bias_ids", at::kInt, logits);
    check_shape(*bias_ids, "bias_ids", "num_slots, max_bias", {num_slots, max_bias});
    check_dense(*bias_values, "bias_values", at::kFloat, logits);
    check_shape(*bias_values, "bias_values", "num_slots, max_bias", {num_slots, max_bias});
    check_dense(*bias_until, "bias_until", at::kInt, logits);
    check_shape(*bias_until, "bias_until", "num_slots, max_bias", {num_slots, max_bias});
  }
  if (leaders.has_value()) {
    check_on_cuda(logits, "sample with leaders");
    check_leaders(*leaders, num_rows, vocab_size, logits);
  }
  StepCounters counters{};
  const int parts = token_ids.has_value() + step_positions.has_value() + turns.has_value() +
                    host_tokens.has_value();
  if (parts != 0) {
    check_on_cuda(logits, "sample with counters");
    if (parts != 4) fail("counters need their four parts");
    std::set<const void*> places = {slots.data_ptr(), positions.data_ptr()};
    for (const Tensor* t : {&*token_ids, &*step_positions, &*turns}) {
      check_dense(*t, "token_ids, step_positions, turns", at::kInt, logits);
      check_shape(*t, "token_ids, step_positions, turns", "num_rows", {num_rows});
      if (num_rows > 0 && !places.insert(t->data_ptr()).second)
        fail("token_ids, step_positions and turns must lie apart, and apart from slots, positions");
    }
    const Tensor& host = *host_tokens;
    if (host.scalar_type() != at::kInt || host.dim() != 2 || !host.is_contiguous() ||
        !host.is_pinned() || host.size(0) < 1 || host.size(1) < num_rows)
      fail("host_tokens is int32 [turns, num_rows or more] in pinned memory of the host");
    counters = {static_cast<int32_t*>(step_positions->data_ptr()),
                static_cast<int32_t*>(token_ids->data_ptr()),
                static_cast<int32_t*>(turns->data_ptr()),
                static_cast<int32_t*>(host.data_ptr()),
                host.size(0),
                host.size(1)};
  }
  const SampleParams p{static_cast<const float*>(logits.data_ptr()),
                       row_stride(logits),
                       ints(slots),
                       static_cast<int32_t*>(positions.data_ptr()),
                       static_cast<int32_t*>(state.data_ptr()),
                       row_stride(state),
                       data_or_null<int32_t>(counts),
                       data_or_null<const int32_t>(bias_ids),
                       data_or_null<const float>(bias_values),
                       data_or_null<const int32_t>(bias_until),
                       max_bias,
                       static_cast<int32_t*>(tokens.data_ptr()),
                       num_rows,
                       vocab_size,
                       data_or_null<const uint64_t>(leaders),
                       data_or_null(workspace),
                       settled,
                       counters};
  LAUNCH(sample, logits, p);
}

// Bytes of the workspace of sample; 0 on the CPU, which needs none.
inline int64_t sample_workspace_size([[maybe_unused]] int64_t max_rows,
                                     [[maybe_unused]] int64_t vocab_size) {
#ifdef MINIVLLM_WITH_CUDA
  return cuda::sample_workspace_size(max_rows, vocab_size);
#else
  return 0;
#endif
}

inline void logprobs(const Tensor& logprobs, const Tensor& ranks, const Tensor& top_ids,
                     const Tensor& top_logprobs, const Tensor& logits, const Tensor& tokens) {
  CHECK_ROWS(logits, at::kFloat, logits);
  const int64_t num_rows = logits.size(0), vocab_size = logits.size(1);
  CHECK_DENSE(tokens, at::kInt, logits);
  CHECK_SHAPE(tokens, num_rows);
  CHECK_DENSE(logprobs, at::kFloat, logits);
  CHECK_SHAPE(logprobs, num_rows);
  CHECK_DENSE(ranks, at::kInt, logits);
  CHECK_SHAPE(ranks, num_rows);
  const int64_t top_n = top_ids.size(-1);
  if (top_n > vocab_size) fail("top_n = ", top_n, " is more than vocab_size = ", vocab_size);
  CHECK_DENSE(top_ids, at::kInt, logits);
  CHECK_SHAPE(top_ids, num_rows, top_n);
  CHECK_DENSE(top_logprobs, at::kFloat, logits);
  CHECK_SHAPE(top_logprobs, num_rows, top_n);
  const LogprobsParams p{static_cast<const float*>(logits.data_ptr()),
                         row_stride(logits),
                         ints(tokens),
                         static_cast<float*>(logprobs.data_ptr()),
                         static_cast<int32_t*>(ranks.data_ptr()),
                         static_cast<int32_t*>(top_ids.data_ptr()),
                         static_cast<float*>(top_logprobs.data_ptr()),
                         num_rows,
                         vocab_size,
                         top_n};
  LAUNCH(logprobs, logits, p);
}

inline void count_tokens(const Tensor& counts, const Tensor& token_ids, int64_t num_prompt_tokens) {
  const int64_t vocab_size = counts.numel(), num_tokens = token_ids.numel();
  CHECK_DENSE(counts, at::kInt, counts);
  CHECK_SHAPE(counts, vocab_size);
  CHECK_DENSE(token_ids, at::kInt, counts);
  CHECK_SHAPE(token_ids, num_tokens);
  const CountTokensParams p{static_cast<int32_t*>(counts.data_ptr()), ints(token_ids), num_tokens,
                            num_prompt_tokens, vocab_size};
  LAUNCH(count_tokens, counts, p);
}

}  // namespace minivllm::bindings
