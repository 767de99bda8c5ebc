// Which instruction set the CPU kernels use, found once at run time.
//
// A kernel header is compiled once for each set by each_isa.h, into a namespace of the set's name;
// MINIVLLM_SELECT(name) picks the function to call. No -march flag is needed, so that a wheel runs
// on any machine.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define MINIVLLM_X86 1
// GCC 12 takes the deliberately undefined operands of its own intrinsics for a mistake.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#else
#define MINIVLLM_X86 0
#endif

namespace minivllm::cpu {

enum class Isa { kPlain, kAvx2, kAvx512, kAvx512Bf16 };

// MINIVLLM_CPU_ISA=plain|avx2|avx512 lowers the choice (to test the other paths).
Isa isa();
const char* isa_name();

}  // namespace minivllm::cpu
