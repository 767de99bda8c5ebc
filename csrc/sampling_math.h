// What drawing a token means, in arithmetic that gives the same bits on the CPU and on CUDA.
//
//   adjusted = penalties(logit + bias)
//   score    = adjusted / temperature + Gumbel(seed, sample, position, token id)
//   token    = arg-max of the scores of the tokens that min-p, top-k and top-p keep
//
// Sums of a * b + c are written as fmaf, so that no compiler has a choice of how to round them.
// Scores are float64: an arg-max over them does not depend on how a row is divided, and the noise
// still counts beside a logit of 6e4 over a temperature of 1e-4.
//
// Noise: Philox 4x32-10, https://doi.org/10.1145/2063384.2063405. Gumbel-max:
// https://arxiv.org/abs/1411.0030
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "kernels.h"

#if defined(__CUDACC__)
#define MINIVLLM_HD __host__ __device__ __forceinline__
#else
#define MINIVLLM_HD inline
#endif

namespace minivllm::sampling {

// Below this a temperature means greedy.
constexpr float kGreedyTemperature = 1e-5f;
constexpr int32_t kPromptBit = 1 << 30;
constexpr int kQuad = 4;  // tokens that share one call of the generator

// Distances are (peak - logit) / temperature, in nats. Noise lies in [-2.82, 22.88], so that a
// token this far from the peak cannot win against it; its weight rounds to nothing as well.
constexpr float kReach = 26.0f;
constexpr float kMaxGumbel = 22.9f;
constexpr int kWeightBits = 37;  // 2^37 e^-26 < 1, and 2^26 tokens sum to less than 2^63
constexpr int kDistanceBins = 2048;
constexpr int64_t kMaxVocabSize = int64_t{1} << 24;  // ids by int32, sums of weights by int64

MINIVLLM_HD float bits_to_float(int32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

MINIVLLM_HD uint32_t float_to_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Maps a logit and its token id to an integer whose rising order is: larger logits first, equal
// logits by rising id.
MINIVLLM_HD uint64_t order_of(float logit, int32_t id) {
  const uint32_t bits = float_to_bits(logit + 0.0f);  // -0 becomes 0: they are equal
  const uint32_t rising = (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
  return (static_cast<uint64_t>(~rising) << 32) | static_cast<uint32_t>(id);
}
constexpr uint64_t kEverything = ~uint64_t{0};

// Leaders of a row: see LeadersTo.
MINIVLLM_HD int64_t num_leaders(int64_t columns) {
  return (columns + kLeaderColumns - 1) / kLeaderColumns;
}

// One slot's sampling parameters, out of its row of state.
struct Settings {
  float temperature, top_p, min_p, repetition, presence, frequency;
  int32_t top_k, sample, flags, num_bias;
  uint32_t seed_low, seed_high;

  MINIVLLM_HD bool greedy() const { return !(temperature >= kGreedyTemperature); }
  // Whether some tokens are cut off before the draw.
  MINIVLLM_HD bool cuts() const { return !greedy() && (top_k > 0 || top_p < 1.0f || min_p > 0.0f); }
};

MINIVLLM_HD Settings read_settings(const int32_t* state) {
  Settings s;
  s.temperature = bits_to_float(state[kTemperature]);
  s.top_k = state[kTopK];
  s.top_p = bits_to_float(state[kTopP]);
  s.min_p = bits_to_float(state[kMinP]);
  s.repetition = bits_to_float(state[kRepetitionPenalty]);
  s.presence = bits_to_float(state[kPresencePenalty]);
  s.frequency = bits_to_float(state[kFrequencyPenalty]);
  s.seed_low = static_cast<uint32_t>(state[kSeedLow]);
  s.seed_high = static_cast<uint32_t>(state[kSeedHigh]);
  s.sample = state[kSample];
  s.flags = state[kFlags];
  s.num_bias = state[kNumBias];
  return s;
}

// What is done to a row's logits before they are scaled. Pointers are to the slot's own rows.
struct Adjustments {
  const int32_t* counts;  // null: no penalties
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t* bias_until;
  int32_t num_bias;
  int32_t position;

  MINIVLLM_HD bool any() const { return counts != nullptr || num_bias > 0; }

  // A NaN stays one, so that it is seen; a bias of -inf forbids whatever the logit.
  MINIVLLM_HD float biased(float logit, int32_t id) const {
    for (int32_t i = 0; i < num_bias; ++i) {
      if (bias_ids[i] != id || position >= bias_until[i]) continue;
      logit = bias_values[i] == -INFINITY && logit == logit ? -INFINITY : logit + bias_values[i];
    }
    return logit;
  }

  // Repetition counts prompt and output, the other two the output alone, as vLLM has them.
  MINIVLLM_HD float penalised(float logit, int32_t id, const Settings& settings) const {
    const int32_t count = counts[id];
    if (count == 0) return logit;
    logit = logit > 0.0f ? logit / settings.repetition : logit * settings.repetition;
    const int32_t generated = count & (kPromptBit - 1);
    if (generated == 0) return logit;
    return fmaf(-settings.frequency, static_cast<float>(generated), logit) - settings.presence;
  }
};

MINIVLLM_HD Adjustments read_adjustments(const SampleParams& p, const Settings& settings,
                                         int32_t slot, int32_t position) {
  Adjustments a = {};
  a.position = position;
  if (p.counts != nullptr && (settings.flags & kUsesCounts)) {
    a.counts = p.counts + int64_t{slot} * p.vocab_size;
  }
  if (p.bias_ids != nullptr && settings.num_bias > 0) {
    const int64_t start = int64_t{slot} * p.max_bias;
    a.bias_ids = p.bias_ids + start;
    a.bias_values = p.bias_values + start;
    a.bias_until = p.bias_until + start;
    const auto max_bias = static_cast<int32_t>(p.max_bias);
    a.num_bias = settings.num_bias < max_bias ? settings.num_bias : max_bias;
  }
  return a;
}

struct Words {
  uint32_t word[4];
};

MINIVLLM_HD Words philox(Words counter, uint32_t key0, uint32_t key1) {
  uint32_t* c = counter.word;
#if defined(__CUDACC__)
#pragma unroll
#endif
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c[0];
    const uint64_t b = uint64_t{0xCD9E8D57u} * c[2];
    c[0] = static_cast<uint32_t>(b >> 32) ^ c[1] ^ key0;
    c[2] = static_cast<uint32_t>(a >> 32) ^ c[3] ^ key1;
    c[1] = static_cast<uint32_t>(b);
    c[3] = static_cast<uint32_t>(a);
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The random words of tokens 4 quad .. 4 quad + 3.
MINIVLLM_HD Words noise_words(const Settings& settings, int32_t position, int32_t quad) {
  const Words counter = {{static_cast<uint32_t>(quad), static_cast<uint32_t>(position),
                          static_cast<uint32_t>(settings.sample), 0u}};
  return philox(counter, settings.seed_low, settings.seed_high);
}

// log(1 + f) for -0.293 <= f <= 0.415: f - f^2 / 2 + f^3 p(f), p fitted at Chebyshev points.
MINIVLLM_HD float log1p_near_zero(float f) {
  float p = 0.07147885859f;
  p = fmaf(p, f, -0.11570707708f);
  p = fmaf(p, f, 0.11661902815f);
  p = fmaf(p, f, -0.12411130220f);
  p = fmaf(p, f, 0.14249908924f);
  p = fmaf(p, f, -0.16668476164f);
  p = fmaf(p, f, 0.20000708103f);
  p = fmaf(p, f, -0.24999989569f);
  p = fmaf(p, f, 0.33333331347f);
  p = fmaf(p, f, -0.5f);
  return fmaf(p * f, f, f);
}

// The natural logarithm of a positive, normal x.
MINIVLLM_HD float log_of(float x) {
  constexpr uint32_t kSqrtHalf = 0x3f3504f3u;
  const uint32_t bits = float_to_bits(x);
  const int32_t exponent = static_cast<int32_t>(bits - kSqrtHalf) >> 23;
  const uint32_t mantissa = bits - (static_cast<uint32_t>(exponent) << 23);
  const float f = bits_to_float(static_cast<int32_t>(mantissa)) - 1.0f;
  return fmaf(static_cast<float>(exponent), 0.69314718056f, log1p_near_zero(f));
}

// u = (word + 1/2) / 2^32, kept below 1: its smallest values, which make the largest noise, keep
// all the bits of a float.
MINIVLLM_HD float uniform_of(uint32_t word) {
  const float u = fmaf(static_cast<float>(word), 0x1p-32f, 0x1p-33f);
  return u < 0x1.fffffep-1f ? u : 0x1.fffffep-1f;
}

// -log(-log(1 - u)).
MINIVLLM_HD float gumbel_of(uint32_t word) {
  const float u = uniform_of(word);
  const float exponential = u < 0.25f ? -log1p_near_zero(-u) : -log_of(1.0f - u);
  return -log_of(exponential);
}

MINIVLLM_HD double score_of(float logit, double inverse_temperature, uint32_t word) {
  return fma(static_cast<double>(logit), inverse_temperature, static_cast<double>(gumbel_of(word)));
}

struct Best {
  double score = -INFINITY;
  int32_t id = -1;

  // Ties go to the lowest id; a score of -inf or NaN is never taken.
  MINIVLLM_HD void take(double other_score, int32_t other_id) {
    if (other_score > score ||
        (other_score == score && id >= 0 && other_id >= 0 && other_id < id)) {
      score = other_score;
      id = other_id;
    }
  }
};

// e^-distance in units of 2^-37, rounded down; distance lies in [0, kReach).
MINIVLLM_HD uint64_t weight_of(float distance) {
  constexpr float kLog2E = 1.44269504089f;
  const float whole = floorf(fmaf(distance, -kLog2E, 0.5f));
  const float f = fmaf(distance, -kLog2E, -whole);
  // 2^f = 1 + f q(f) for -0.5 <= f <= 0.5.
  float q = 0.00015461448f;
  q = fmaf(q, f, 0.00133908668f);
  q = fmaf(q, f, 0.00961805694f);
  q = fmaf(q, f, 0.05550356954f);
  q = fmaf(q, f, 0.24022650719f);
  q = fmaf(q, f, 0.69314718246f);
  const float scale = bits_to_float((static_cast<int32_t>(whole) + kWeightBits + 127) << 23);
  return static_cast<uint64_t>(fmaf(q, f, 1.0f) * scale);
}

// How far the tokens of a row lie from its largest logit, and how far is too far.
struct Range {
  float peak, inverse_temperature, limit;

  MINIVLLM_HD Range(const Settings& settings, float peak)
      : peak(peak), inverse_temperature(1.0f / settings.temperature), limit(kReach) {
    // min-p, relative to the likeliest token: p < min_p * p_max.
    if (settings.min_p > 0.0f) {
      const float at_least = settings.min_p > 1e-30f ? settings.min_p : 1e-30f;
      limit = -log_of(at_least < 1.0f ? at_least : 1.0f);
    }
  }
  MINIVLLM_HD float distance(float logit) const { return (peak - logit) * inverse_temperature; }
  MINIVLLM_HD bool holds(float distance) const { return distance < kReach && distance <= limit; }
  MINIVLLM_HD static int bin(float distance) {
    const int bin = static_cast<int>(distance * (kDistanceBins / kReach));
    return bin < kDistanceBins ? bin : kDistanceBins - 1;
  }
};

// The first cut is top-k and counts tokens; the second is top-p and adds weights. Both keep the
// shortest run of tokens, in order_of's order, that reaches a target.
enum class CutKind { kTopK, kTopP };

MINIVLLM_HD bool applies(CutKind kind, const Settings& settings) {
  return kind == CutKind::kTopK ? settings.top_k > 0 : settings.top_p < 1.0f;
}

MINIVLLM_HD uint64_t amount_of(CutKind kind, float distance) {
  return kind == CutKind::kTopK ? 1 : weight_of(distance);
}

// `total` is what the tokens kept so far add up to; never 0, never above it.
MINIVLLM_HD uint64_t target_of(CutKind kind, const Settings& settings, uint64_t total) {
  const uint64_t target = kind == CutKind::kTopK
                              ? static_cast<uint64_t>(settings.top_k)
                              : static_cast<uint64_t>(ceil(static_cast<double>(settings.top_p) *
                                                           static_cast<double>(total)));
  const uint64_t at_least_one = target > 0 ? target : 1;
  return at_least_one < total ? at_least_one : total;
}

}  // namespace minivllm::sampling
