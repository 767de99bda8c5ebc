// Packs weights and shares the blocks of a matrix product out to the threads.
#include <cstdlib>
#include <type_traits>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "parallel.h"
#include "types.h"

namespace minivllm::cpu {

// What the kernels of linear_kernels.h work on: some rows of one product.
struct LinearJob {
  const LinearParams* p;
  const void* x;  // [num_rows, x_stride], float or bfloat16
  int64_t x_stride;
  int64_t steps;  // over k
  int64_t first_row, num_rows;
};

}  // namespace minivllm::cpu

#define MINIVLLM_KERNELS "linear_kernels.h"
#define MINIVLLM_WITH_BF16_DOT
#include "each_isa.h"

namespace minivllm::cpu {

namespace {

constexpr int64_t kBlockOutputs = 16;
// Rows whose x is converted to float at a time.
constexpr int64_t kConvertedRows = 256;
// What a thread should at least have to do: below that, waking it costs more than it saves. Reading
// a weight costs as much as its products with kRowsOfARead rows.
constexpr int64_t kGrainProducts = 1 << 19, kRowsOfARead = 8;

int64_t values_per_step(DType dtype) { return dtype == DType::kBFloat16 ? 2 : 1; }

// Weights are read once a token, in order: pages of 2 MiB keep the address translation out of it.
void ask_for_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] int64_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = 1 << 21;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) & ~(kHugePage - 1);
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

void run(const LinearJob& job, bool dot) {
  const LinearParams& p = *job.p;
  auto kernel = MINIVLLM_SELECT(linear);
#if MINIVLLM_X86
  if (dot) kernel = &avx512_bf16::linear;
#endif
  const int64_t block_cost = kBlockOutputs * p.k * (job.num_rows + kRowsOfARead);
  parallel_for(ceil_div(p.n, kBlockOutputs), ceil_div(kGrainProducts, block_cost),
               [&](int64_t begin, int64_t end) { kernel(job, begin, end); });
}

}  // namespace

int64_t packed_weight_size(int64_t n, int64_t k, DType dtype) {
  const int64_t values = values_per_step(dtype);
  return ceil_div(n, kBlockOutputs) * kBlockOutputs * ceil_div(k, values) * values;
}

void pack_weight(void* packed, const void* weight, int64_t n, int64_t k, DType dtype) {
  const int64_t values = values_per_step(dtype), steps = ceil_div(k, values);
  with_dtype(dtype, [&](auto tag) {
    using T = decltype(tag);
    const T* from = static_cast<const T*>(weight);
    T* to = static_cast<T*>(packed);
    ask_for_huge_pages(packed, packed_weight_size(n, k, dtype) * static_cast<int64_t>(sizeof(T)));
    parallel_for(ceil_div(n, kBlockOutputs), 1, [&](int64_t begin, int64_t end) {
      for (int64_t block = begin; block < end; ++block) {
        T* out = to + block * steps * kBlockOutputs * values;
        for (int64_t step = 0; step < steps; ++step) {
          for (int64_t lane = 0; lane < kBlockOutputs; ++lane) {
            for (int64_t v = 0; v < values; ++v, ++out) {
              const int64_t row = block * kBlockOutputs + lane, column = step * values + v;
              *out = row < n && column < k ? from[row * k + column] : T{};
            }
          }
        }
      }
    });
  });
}

void linear(const LinearParams& p) {
  if (p.epilogue == Epilogue::kSiluMul && p.n % 2 != 0) {
    throw std::invalid_argument("linear: gate and up need an even number of outputs");
  }
  if (p.num_tokens == 0 || p.n == 0) return;
  const int64_t values = values_per_step(p.dtype), steps = ceil_div(p.k, values);
  const bool dot = isa() == Isa::kAvx512Bf16 && p.dtype == DType::kBFloat16;
  if (dot || p.dtype == DType::kFloat32) {
    return run({&p, p.x, p.x_stride, steps, 0, p.num_tokens}, dot);
  }
  // Reused from call to call: a product a layer would otherwise allocate each time.
  thread_local std::vector<float> converted;
  const int64_t stride = steps * values;
  for (int64_t first = 0; first < p.num_tokens; first += kConvertedRows) {
    const int64_t rows =
        p.num_tokens - first < kConvertedRows ? p.num_tokens - first : kConvertedRows;
    converted.assign(static_cast<size_t>(rows * stride), 0.0f);
    with_dtype(p.dtype, [&](auto tag) {
      const auto* x = static_cast<const decltype(tag)*>(p.x);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < p.k; ++i) {
          converted[static_cast<size_t>(r * stride + i)] =
              to_float(x[(first + r) * p.x_stride + i]);
        }
      }
    });
    run({&p, converted.data(), stride, steps, first, rows}, false);
  }
}

}  // namespace minivllm::cpu
