// What the bindings check of a tensor before its pointer leaves torch, and the switch between the
// devices. A failed check is a std::invalid_argument, a ValueError in Python, that names the
// argument.
#pragma once

#include <ATen/ATen.h>
#ifdef MINIVLLM_WITH_CUDA
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#endif

#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels.h"
#include "sampling_math.h"

namespace minivllm {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Parts of messages. No streams: where a part of the C++ library is linked into this module beside
// torch's own, they look their formats up in the wrong one, and crash on the first number.
inline std::string text(const char* part) { return part; }
template <class Integer, class = std::enable_if_t<std::is_integral_v<Integer>>>
std::string text(Integer part) {
  return std::to_string(part);
}
inline std::string text(at::ScalarType part) { return c10::toString(part); }
inline std::string text(at::Device part) { return part.str(); }
inline std::string text(at::IntArrayRef part) {
  std::string sizes;
  for (const int64_t size : part) sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
  return "[" + sizes + "]";
}

template <class... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  throw std::invalid_argument((text(parts) + ...));
}

inline DType dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return DType::kFloat32;
    case at::kBFloat16:
      return DType::kBFloat16;
    case at::kHalf:
      return DType::kFloat16;
    default:
      fail(name, " must be float32, bfloat16 or float16, not ", t.scalar_type());
  }
}

// A tensor's sizes against what they must be; names is "[rows, columns]".
inline void check_shape(const Tensor& t, const char* name, const char* names,
                        std::initializer_list<int64_t> sizes) {
  if (t.sizes() != at::IntArrayRef(sizes)) {
    fail(name, " must have the shape [", names, "] = ", at::IntArrayRef(sizes), ", not ",
         t.sizes());
  }
}

// CHECK_SHAPE(q, num_tokens, num_heads) names the dimensions by the variables that hold them.
#define CHECK_SHAPE(t, ...) check_shape(t, #t, #__VA_ARGS__, {__VA_ARGS__})
// Contiguous, of a dtype, and where like is.
#define CHECK_DENSE(t, dtype, like) check_dense(t, #t, dtype, like)
// The same, but the rows of a matrix may be further apart than they are long.
#define CHECK_ROWS(t, dtype, like) check_rows(t, #t, dtype, like)

inline void check_kind(const Tensor& t, const char* name, at::ScalarType dtype,
                       const Tensor& like) {
  if (t.scalar_type() != dtype) fail(name, " must be ", dtype, ", not ", t.scalar_type());
  if (t.device() != like.device()) {
    fail(name, " is on ", t.device(), " and the first argument on ", like.device());
  }
}

inline void check_dense(const Tensor& t, const char* name, at::ScalarType dtype,
                        const Tensor& like) {
  check_kind(t, name, dtype, like);
  if (!t.is_contiguous()) fail(name, " must be contiguous; its strides are ", t.strides());
}

inline void check_rows(const Tensor& t, const char* name, at::ScalarType dtype,
                       const Tensor& like) {
  check_kind(t, name, dtype, like);
  if (t.dim() != 2) fail(name, " must have two dimensions, not ", t.dim());
  if (t.size(1) > 1 && t.stride(1) != 1) {
    fail(name, " must have contiguous rows; its strides are ", t.strides());
  }
}

// The distance of a matrix's rows; one row alone may have any stride.
inline int64_t row_stride(const Tensor& t) { return t.size(0) > 1 ? t.stride(0) : t.size(1); }

template <class T = void>
T* data_or_null(const OptionalTensor& t) {
  return t.has_value() ? static_cast<T*>(t->data_ptr()) : nullptr;
}

// The slots' rows of state: see SlotWord.
inline void check_state(const Tensor& state, const Tensor& like) {
  CHECK_ROWS(state, at::kInt, like);
  if (state.size(1) < kSlotWords) fail("a row of state must hold ", kSlotWords, " words");
}

// See LeadersTo.
inline void check_leaders(const Tensor& leaders, int64_t rows, int64_t columns,
                          const Tensor& like) {
  check_dense(leaders, "leaders", at::kLong, like);
  check_shape(leaders, "leaders", "rows, columns / 64", {rows, sampling::num_leaders(columns)});
}

inline const int32_t* ints(const Tensor& t) { return static_cast<const int32_t*>(t.data_ptr()); }

inline void check_on_cpu(const Tensor& t) {
  if (t.is_cpu()) return;
  throw std::runtime_error("a tensor is on " + text(t.device()) +
                           " and this minivllm was compiled without kernels for it");
}

inline void check_on_cuda(const Tensor& t, const char* what) {
  if (t.is_cpu()) fail(what, " is for CUDA tensors");
#ifdef MINIVLLM_WITH_CUDA
  if (t.is_cuda()) return;
#endif
  check_on_cpu(t);
}

// Calls the launcher of the device on which tensor is, on its current stream.
#ifdef MINIVLLM_WITH_CUDA
#define LAUNCH(name, tensor, params)                                  \
  do {                                                                \
    if ((tensor).is_cuda()) {                                         \
      const c10::cuda::CUDAGuard guard((tensor).device());            \
      cuda::name(params, c10::cuda::getCurrentCUDAStream().stream()); \
    } else {                                                          \
      check_on_cpu(tensor);                                           \
      cpu::name(params);                                              \
    }                                                                 \
  } while (0)
#else
#define LAUNCH(name, tensor, params) \
  do {                               \
    check_on_cpu(tensor);            \
    cpu::name(params);               \
  } while (0)
#endif

// The same for what there is on CUDA alone; check_on_cuda comes before.
#ifdef MINIVLLM_WITH_CUDA
#define LAUNCH_CUDA(name, tensor, params)                           \
  do {                                                              \
    const c10::cuda::CUDAGuard guard((tensor).device());            \
    cuda::name(params, c10::cuda::getCurrentCUDAStream().stream()); \
  } while (0)
#else
#define LAUNCH_CUDA(name, tensor, params) static_cast<void>(params)
#endif

}  // namespace minivllm
