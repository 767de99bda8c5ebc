// The matrix product's instances for float16. See gemm_sm90.cuh.
#include "gemm_launch.cuh"

namespace minivllm::cuda {

void launch_gemm_fp16(const LinearParams& p, const GemmConfig& config, Stream stream) {
  gemm::launch_gemm<__half>(p, config, stream);
}

}  // namespace minivllm::cuda
