// Which matrix product runs: that for Hopper (gemm_sm90.cuh) in one of its instances, or those for
// every card. Nothing of a config changes a result: every instance walks the same chains of k16
// steps over the same chunks of K for each output.
#pragma once

#include "../kernels.h"

namespace minivllm::cuda {

// What the two CTAs of a cluster have in common and copy half each, for both.
enum class Sharing : int { kNone = 0, kTokens = 1, kWeights = 2 };

// Who adds the chunks of K up.
enum class Chunks : int {
  kApart = 0,  // nobody: there is one, or each is a tile of its own and leaves its sums
  kAdded = 1,  // a CTA, which walks them all
  kSplit = 2,  // a cluster with a CTA for each
};

// What an instance is compiled for: anything, or one thing that a decoder's steps want, without a
// bias. The latter are 12 to 43 KB of machine code instead of 32 to 83, which counts in kernels of
// a few microseconds.
enum class Task : int {
  kAnything = 0,
  kRopeKv = 1,     // kRopeKv of rows whose norm is half done
  kWeigh = 2,      // kResidual and the first half of a norm
  kSiluMul = 3,    // kSiluMul of rows whose norm is half done
  kLeaveSums = 4,  // the chunks' sums, for the next kernel to add
  kLogits = 5,     // float32 with leaders
};

struct GemmConfig {
  int warpgroups;    // 1 or 2: 64 or 128 tokens a tile
  int columns;       // rows of the weight, columns of the output, a tile
  int stage_blocks;  // k-blocks of 64 in a stage of the ring; divides k / 64
  int ring_bytes;    // at most this much shared memory for the ring; at least two stages are taken
  Sharing sharing;
  Chunks chunks;
  Task task = Task::kAnything;
};

// The task that the product is, where instances of the config's shape may be compiled for it.
Task task_of(const LinearParams& p, const GemmConfig& config);
GemmConfig choose_gemm_config(const LinearParams& p, int num_sms);

void launch_gemm_bf16(const LinearParams& p, const GemmConfig& config, Stream stream);
void launch_gemm_fp16(const LinearParams& p, const GemmConfig& config, Stream stream);
// bfloat16 and float16: a chain over each of num_parts parts of K, at most 4.
void launch_gemm_mma(const LinearParams& p, int num_parts, Stream stream);
void launch_gemm_simt(const LinearParams& p, Stream stream);  // float32

}  // namespace minivllm::cuda
