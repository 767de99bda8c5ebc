// Compiles MINIVLLM_KERNELS (a header without a guard) once for each instruction set.
// MINIVLLM_WITH_BF16_DOT asks for a fourth copy in which MINIVLLM_BF16_DOT is 1.
#include "isa.h"
#include "types.h"

#define MINIVLLM_BF16_DOT 0

#if MINIVLLM_X86

#ifdef __clang__
#define MINIVLLM_TARGET_PUSH(set) \
  MINIVLLM_PRAGMA(clang attribute push(__attribute__((target(set))), apply_to = function))
#define MINIVLLM_TARGET_POP MINIVLLM_PRAGMA(clang attribute pop)
#else
#define MINIVLLM_TARGET_PUSH(set) MINIVLLM_PRAGMA(GCC push_options) MINIVLLM_PRAGMA(GCC target(set))
#define MINIVLLM_TARGET_POP MINIVLLM_PRAGMA(GCC pop_options)
#endif
#define MINIVLLM_PRAGMA(x) _Pragma(#x)

MINIVLLM_TARGET_PUSH("avx2,fma,f16c")
namespace minivllm::cpu::avx2 {
#include "simd_avx2.h"
// Uses the vectors above.
#include MINIVLLM_KERNELS
}  // namespace minivllm::cpu::avx2
MINIVLLM_TARGET_POP

MINIVLLM_TARGET_PUSH("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
namespace minivllm::cpu::avx512 {
#include "simd_avx512.h"
// Uses the vectors above.
#include MINIVLLM_KERNELS
}  // namespace minivllm::cpu::avx512
MINIVLLM_TARGET_POP

#ifdef MINIVLLM_WITH_BF16_DOT
#undef MINIVLLM_BF16_DOT
#define MINIVLLM_BF16_DOT 1
MINIVLLM_TARGET_PUSH("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")
namespace minivllm::cpu::avx512_bf16 {
#include "simd_avx512.h"
// Uses the vectors above.
#include MINIVLLM_KERNELS
}  // namespace minivllm::cpu::avx512_bf16
MINIVLLM_TARGET_POP
#undef MINIVLLM_BF16_DOT
#define MINIVLLM_BF16_DOT 0
#endif

#define MINIVLLM_SELECT(name) \
  (isa() >= Isa::kAvx512 ? &avx512::name : isa() == Isa::kAvx2 ? &avx2::name : &plain::name)
#else
#define MINIVLLM_SELECT(name) (&plain::name)
#endif

namespace minivllm::cpu::plain {
#include "simd_plain.h"
// Uses the vectors above.
#include MINIVLLM_KERNELS
}  // namespace minivllm::cpu::plain
