// The one file that knows torch, with its parts bindings_model.h, bindings_linear.h and
// bindings_sampling.h: threads and the module minivllm._C.
#include <ATen/Parallel.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/version.h>

#include "bindings_linear.h"
#include "bindings_model.h"
#include "bindings_sampling.h"
#include "cpu/isa.h"
#include "cpu/parallel.h"

#ifndef MINIVLLM_CUDA_ARCHS
#define MINIVLLM_CUDA_ARCHS ""
#endif

void minivllm::cpu::parallel_ranges(int64_t n, int64_t grain, RangeFunction function,
                                    void* context) {
  at::parallel_for(0, n, grain, [=](int64_t begin, int64_t end) { function(context, begin, end); });
}

PYBIND11_MODULE(_C, m) {
  namespace bindings = minivllm::bindings;
  namespace py = pybind11;
  // Nothing below touches a Python object, so that other threads may run meanwhile.
  const auto define = [&m](const char* name, auto function, auto... arguments) {
    m.def(name, function, py::call_guard<py::gil_scoped_release>(), arguments...);
  };
  define("embedding", &bindings::embedding);
  define("rms_norm", &bindings::rms_norm);
  define("weigh_rows", &bindings::weigh_rows);
  define("embed_and_weigh", &bindings::embed_and_weigh);
  define("rope_kv", &bindings::rope_kv);
  define("prefill_attention", &bindings::prefill_attention);
  define("decode_attention", &bindings::decode_attention, py::arg("out"), py::arg("q"),
         py::arg("kv_cache"), py::arg("block_table"), py::arg("slots"), py::arg("seq_lens"),
         py::arg("max_seq_len"), py::arg("scale"), py::arg("workspace"),
         py::arg("settled") = false);
  define("attention_workspace_size", &bindings::attention_workspace_size);
  define("silu_mul", &bindings::silu_mul);
  define("packed_weight_size", &bindings::packed_weight_size);
  define("pack_weight", &bindings::pack_weight);
  define("linear", &bindings::linear, py::arg("out"), py::arg("x"), py::arg("weight"), py::arg("n"),
         py::arg("bias"), py::arg("epilogue"), py::arg("num_chunks"),
         py::arg("square_sums") = py::none(), py::arg("eps") = 0.0);
  define("linear_leaders", &bindings::linear_leaders);
  define("linear_residual_norm", &bindings::linear_residual_norm);
  define("linear_rope_kv", &bindings::linear_rope_kv);
  define("linear_uses_wgmma", &bindings::linear_uses_wgmma);
  define("linear_chunks", &bindings::linear_chunks);
  define("update_state", &bindings::update_state);
  define("copy_words", &bindings::copy_words);
  define("sample", &bindings::sample);
  define("sample_workspace_size", &bindings::sample_workspace_size);
  define("logprobs", &bindings::logprobs);
  define("count_tokens", &bindings::count_tokens);
  define("cpu_isa", &minivllm::cpu::isa_name);

#ifdef MINIVLLM_WITH_CUDA
  m.attr("with_cuda") = true;
#else
  m.attr("with_cuda") = false;
#endif
  m.attr("cuda_archs") = MINIVLLM_CUDA_ARCHS;
  m.attr("torch_version") = TORCH_VERSION;

  m.attr("LAST_TOKEN") = static_cast<int>(minivllm::kLastToken);
  m.attr("TEMPERATURE") = static_cast<int>(minivllm::kTemperature);
  m.attr("TOP_K") = static_cast<int>(minivllm::kTopK);
  m.attr("TOP_P") = static_cast<int>(minivllm::kTopP);
  m.attr("MIN_P") = static_cast<int>(minivllm::kMinP);
  m.attr("REPETITION_PENALTY") = static_cast<int>(minivllm::kRepetitionPenalty);
  m.attr("PRESENCE_PENALTY") = static_cast<int>(minivllm::kPresencePenalty);
  m.attr("FREQUENCY_PENALTY") = static_cast<int>(minivllm::kFrequencyPenalty);
  m.attr("SEED_LOW") = static_cast<int>(minivllm::kSeedLow);
  m.attr("SEED_HIGH") = static_cast<int>(minivllm::kSeedHigh);
  m.attr("SAMPLE") = static_cast<int>(minivllm::kSample);
  m.attr("FLAGS") = static_cast<int>(minivllm::kFlags);
  m.attr("NUM_BIAS") = static_cast<int>(minivllm::kNumBias);
  m.attr("SLOT_WORDS") = static_cast<int>(minivllm::kSlotWords);
  m.attr("USES_COUNTS") = static_cast<int>(minivllm::kUsesCounts);
  m.attr("LEADER_SUFFICES") = static_cast<int>(minivllm::kLeaderSuffices);
  m.attr("LEADER_COLUMNS") = static_cast<int>(minivllm::kLeaderColumns);
  m.attr("EPILOGUE_NONE") = static_cast<int>(minivllm::Epilogue::kNone);
  m.attr("EPILOGUE_RESIDUAL") = static_cast<int>(minivllm::Epilogue::kResidual);
  m.attr("EPILOGUE_SILU_MUL") = static_cast<int>(minivllm::Epilogue::kSiluMul);
}
