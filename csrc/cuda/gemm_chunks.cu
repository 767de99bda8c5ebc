// How a product's K is cut: by its shape alone, so that the bits of an output never depend on the
// tokens.
#include "common.cuh"

namespace minivllm::cuda {

int64_t linear_chunks(int64_t, int64_t, Epilogue) { return 1; }

}  // namespace minivllm::cuda
