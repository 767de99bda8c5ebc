// RMSNorm (https://arxiv.org/abs/1910.07467), RoPE with the KV write
// (https://arxiv.org/abs/2104.09864) and SiLU: rows shared out to the threads.
#include <cmath>

#include "parallel.h"

#define MINIVLLM_KERNELS "rows_kernels.h"
#include "each_isa.h"

namespace minivllm::cpu {

namespace {

// Elements that a thread should at least have: below that, waking it costs more than it saves.
constexpr int64_t kGrainElements = 16384;

int64_t row_grain(int64_t row_elements) { return ceil_div(kGrainElements, row_elements); }

}  // namespace

void rms_norm(const RmsNormParams& p) {
  const auto kernel = MINIVLLM_SELECT(rms_norm);
  parallel_for(p.num_rows, row_grain(p.hidden_size),
               [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

void rope_kv(const RopeKvParams& p) {
  if (p.kv.head_dim % 2 != 0) throw std::invalid_argument("rope_kv: head_dim must be even");
  const auto kernel = MINIVLLM_SELECT(rope_kv);
  parallel_for(p.num_tokens, row_grain((p.num_q_heads + 2 * p.kv.num_kv_heads) * p.kv.head_dim),
               [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

void silu_mul(const SiluMulParams& p) {
  const auto kernel = MINIVLLM_SELECT(silu_mul);
  parallel_for(p.num_tokens, row_grain(2 * p.size),
               [&](int64_t begin, int64_t end) { kernel(p, begin, end); });
}

}  // namespace minivllm::cpu
