// Draws tokens, gives log probabilities and keeps the state rows, on the CPU. The meaning of a
// draw, and every rounding in it, is in sampling_math.h: CUDA gives the same tokens.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "../kernels.h"
#include "../sampling_math.h"
#include "parallel.h"

namespace minivllm::cpu {
namespace {

using sampling::Adjustments;
using sampling::Best;
using sampling::CutKind;
using sampling::kQuad;
using sampling::order_of;
using sampling::Range;
using sampling::Settings;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

struct Peak {
  float logit = -kInfinity;
  int32_t id = -1;  // -1 too where a logit is NaN
};

// The largest logit and the lowest id that has it.
Peak find_peak(const float* logits, int64_t size) {
  constexpr int kLanes = 16;  // independent, so that the compiler may use vectors
  float largest[kLanes];
  int32_t has_nan[kLanes] = {};
  std::fill_n(largest, kLanes, -kInfinity);
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float x = logits[i + lane];
      largest[lane] = x > largest[lane] ? x : largest[lane];
      has_nan[lane] |= x != x;
    }
  }
  Peak peak;
  int32_t any_nan = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    peak.logit = std::max(peak.logit, largest[lane]);
    any_nan |= has_nan[lane];
  }
  for (; i < size; ++i) {
    peak.logit = logits[i] > peak.logit ? logits[i] : peak.logit;
    any_nan |= logits[i] != logits[i];
  }
  if (any_nan || peak.logit == -kInfinity) return peak;
  peak.id = static_cast<int32_t>(std::find(logits, logits + size, peak.logit) - logits);
  return peak;
}

int32_t draw_from_all(const float* logits, int64_t size, const Settings& settings,
                      int32_t position) {
  const double inverse_temperature = 1.0 / static_cast<double>(settings.temperature);
  Best best;
  for (int64_t start = 0; start < size; start += kQuad) {
    const int64_t end = std::min<int64_t>(start + kQuad, size);
    const float largest = *std::max_element(logits + start, logits + end);
    if (largest * inverse_temperature + sampling::kMaxGumbel < best.score) continue;
    const auto words =
        sampling::noise_words(settings, position, static_cast<int32_t>(start / kQuad));
    for (int64_t id = start; id < end; ++id) {
      const uint32_t word = words.word[id - start];
      // The noise is at most -log(u), and u at least 2^-33 (1 + word): a bound without logarithms.
      const int leading_zeros = word == 0 ? 32 : __builtin_clz(word);
      const double bound = logits[id] * inverse_temperature + 0.6932 * (leading_zeros + 1);
      if (bound < best.score) continue;
      best.take(sampling::score_of(logits[id], inverse_temperature, word),
                static_cast<int32_t>(id));
    }
  }
  return best.id;
}

struct Candidate {
  float logit, distance;
  int32_t id;
};

// Keeps the shortest run of candidates, likeliest first, whose amounts reach the target.
void cut(CutKind kind, const Settings& settings, std::vector<Candidate>& candidates) {
  std::vector<uint64_t> amounts(sampling::kDistanceBins);
  uint64_t total = 0;
  for (const Candidate& c : candidates) {
    const uint64_t amount = sampling::amount_of(kind, c.distance);
    amounts[Range::bin(c.distance)] += amount;
    total += amount;
  }
  uint64_t missing = sampling::target_of(kind, settings, total);
  int crossing = 0;
  while (amounts[crossing] < missing) missing -= amounts[crossing++];

  const auto in_bin = [](int bin) {
    return [bin](const Candidate& c) { return Range::bin(c.distance) < bin; };
  };
  const auto tied = std::partition(candidates.begin(), candidates.end(), in_bin(crossing));
  auto end = std::partition(tied, candidates.end(), in_bin(crossing + 1));
  std::sort(tied, end, [](const Candidate& a, const Candidate& b) {
    return order_of(a.logit, a.id) < order_of(b.logit, b.id);
  });
  for (auto c = tied; c != end; ++c) {
    const uint64_t amount = sampling::amount_of(kind, c->distance);
    if (amount >= missing) {
      end = c + 1;
      break;
    }
    missing -= amount;
  }
  candidates.erase(end, candidates.end());
}

int32_t draw_from_kept(const float* logits, int64_t size, const Settings& settings,
                       int32_t position, float peak) {
  const Range range(settings, peak);
  std::vector<Candidate> candidates;
  for (int64_t id = 0; id < size; ++id) {
    const float distance = range.distance(logits[id]);
    if (range.holds(distance)) {
      candidates.push_back({logits[id], distance, static_cast<int32_t>(id)});
    }
  }
  for (const CutKind kind : {CutKind::kTopK, CutKind::kTopP}) {
    if (sampling::applies(kind, settings)) cut(kind, settings, candidates);
  }
  const double inverse_temperature = 1.0 / static_cast<double>(settings.temperature);
  Best best;
  for (const Candidate& c : candidates) {
    const auto words = sampling::noise_words(settings, position, c.id / kQuad);
    best.take(sampling::score_of(c.logit, inverse_temperature, words.word[c.id % kQuad]), c.id);
  }
  return best.id;
}

int32_t draw(const float* logits, int64_t size, const Settings& settings, int32_t position) {
  const Peak peak = find_peak(logits, size);
  if (peak.id < 0 || peak.logit == kInfinity || settings.greedy()) return peak.id;
  if (settings.cuts()) return draw_from_kept(logits, size, settings, position, peak.logit);
  return draw_from_all(logits, size, settings, position);
}

void sample_row(const SampleParams& p, int64_t row, std::vector<float>& scratch) {
  const int32_t slot = p.slots[row];
  if (slot < 0) return;
  const float* logits = p.logits + row * p.logits_stride;
  int32_t* state = p.state + slot * p.state_stride;
  const Settings settings = sampling::read_settings(state);
  const Adjustments adjustments = sampling::read_adjustments(p, settings, slot, p.positions[row]);
  if (adjustments.any()) {
    scratch.assign(logits, logits + p.vocab_size);
    for (int32_t i = 0; i < adjustments.num_bias; ++i) {
      const int32_t id = adjustments.bias_ids[i];
      // biased() adds all of an id's entries at once.
      if (id >= 0 && id < p.vocab_size) scratch[id] = adjustments.biased(logits[id], id);
    }
    if (adjustments.counts != nullptr) {
      for (int32_t id = 0; id < p.vocab_size; ++id) {
        scratch[id] = adjustments.penalised(scratch[id], id, settings);
      }
    }
    logits = scratch.data();
  }
  const int32_t token = draw(logits, p.vocab_size, settings, p.positions[row]);
  p.tokens[row] = token;
  state[kLastToken] = token;
  if (adjustments.counts != nullptr && token >= 0) ++p.counts[slot * p.vocab_size + token];
}

void logprobs_row(const LogprobsParams& p, int64_t row, std::vector<int32_t>& order) {
  const float* logits = p.logits + row * p.logits_stride;
  float peak = -kInfinity;
  for (int64_t i = 0; i < p.vocab_size; ++i) peak = std::max(peak, logits[i]);
  // Partial sums over i mod 16, then in order: one fixed tree.
  constexpr int kLanes = 16;
  float sums[kLanes] = {};
  for (int64_t i = 0; i < p.vocab_size; ++i) sums[i % kLanes] += std::exp(logits[i] - peak);
  float sum = 0.0f;
  for (const float lane : sums) sum += lane;
  const float log_sum = std::log(sum);
  const auto logprob = [&](int32_t id) { return (logits[id] - peak) - log_sum; };

  const int32_t token = p.tokens[row];
  p.logprobs[row] = std::numeric_limits<float>::quiet_NaN();
  p.ranks[row] = 0;
  if (token >= 0 && token < p.vocab_size) {
    p.logprobs[row] = logprob(token);
    int32_t rank = 1;
    for (int32_t id = 0; id < p.vocab_size; ++id) {
      rank += logits[id] > logits[token] || (logits[id] == logits[token] && id < token);
    }
    p.ranks[row] = rank;
  }
  if (p.top_n == 0) return;
  order.resize(p.vocab_size);
  for (int32_t id = 0; id < p.vocab_size; ++id) order[id] = id;
  const int64_t num_top = std::min(p.top_n, p.vocab_size);
  std::partial_sort(order.begin(), order.begin() + num_top, order.end(), [&](int32_t a, int32_t b) {
    return order_of(logits[a], a) < order_of(logits[b], b);
  });
  for (int64_t i = 0; i < p.top_n; ++i) {
    const bool has = i < num_top;
    p.top_ids[row * p.top_n + i] = has ? order[i] : -1;
    p.top_logprobs[row * p.top_n + i] = has ? logprob(order[i]) : -kInfinity;
  }
}

// Logits that a thread should at least have: below that, waking it costs more than it saves.
constexpr int64_t kGrainLogits = 65536;

int64_t row_grain(int64_t vocab_size) {
  return std::max<int64_t>(kGrainLogits / std::max<int64_t>(vocab_size, 1), 1);
}

}  // namespace

void sample(const SampleParams& p) {
  parallel_for(p.num_rows, row_grain(p.vocab_size), [&](int64_t begin, int64_t end) {
    std::vector<float> scratch;
    for (int64_t row = begin; row < end; ++row) sample_row(p, row, scratch);
  });
}

void logprobs(const LogprobsParams& p) {
  parallel_for(p.num_rows, row_grain(p.vocab_size), [&](int64_t begin, int64_t end) {
    std::vector<int32_t> order;
    for (int64_t row = begin; row < end; ++row) logprobs_row(p, row, order);
  });
}

void update_state(const UpdateStateParams& p) {
  for (int64_t i = 0; i < p.num_pairs; ++i) {
    const int32_t index = p.pairs[2 * i];
    if (index >= 0 && index < p.size) p.state[index] = p.pairs[2 * i + 1];
  }
}

void count_tokens(const CountTokensParams& p) {
  std::fill_n(p.counts, p.vocab_size, 0);
  for (int64_t i = 0; i < p.num_tokens; ++i) {
    const int32_t id = p.token_ids[i];
    if (id < 0 || id >= p.vocab_size) continue;
    if (i < p.num_prompt_tokens) {
      p.counts[id] |= sampling::kPromptBit;
    } else {
      ++p.counts[id];
    }
  }
}

}  // namespace minivllm::cpu
