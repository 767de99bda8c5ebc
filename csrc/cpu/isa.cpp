// Finds the instruction set.
#include "isa.h"

#include <cstdlib>
#include <cstring>

namespace minivllm::cpu {

namespace {

constexpr const char* kNames[] = {"plain", "avx2", "avx512", "avx512_bf16"};

Isa detect() {
  Isa best = Isa::kPlain;
#if MINIVLLM_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
      __builtin_cpu_supports("f16c")) {
    best = Isa::kAvx2;
  }
  if (best == Isa::kAvx2 && __builtin_cpu_supports("avx512f") &&
      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    best = __builtin_cpu_supports("avx512bf16") ? Isa::kAvx512Bf16 : Isa::kAvx512;
  }
#endif
  const char* wanted = std::getenv("MINIVLLM_CPU_ISA");
  for (int i = 0; wanted != nullptr && i < static_cast<int>(best); ++i) {
    if (std::strcmp(wanted, kNames[i]) == 0) return static_cast<Isa>(i);
  }
  return best;
}

}  // namespace

Isa isa() {
  static const Isa found = detect();
  return found;
}

const char* isa_name() { return kNames[static_cast<int>(isa())]; }

}  // namespace minivllm::cpu
