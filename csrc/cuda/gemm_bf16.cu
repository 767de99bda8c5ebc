// The matrix product's instances for bfloat16. See gemm_sm90.cuh.
#include "gemm_launch.cuh"

namespace minivllm::cuda {

void launch_gemm_bf16(const LinearParams& p, const GemmConfig& config, Stream stream) {
  gemm::launch_gemm<__nv_bfloat16>(p, config, stream);
}

}  // namespace minivllm::cuda
