// What the slots' rows of state hold, and the params of the kernels that work on them: the draw,
// its log probabilities, words to and from the host. Part of kernels.h, by the same rules.
#pragma once

#include <cstdint>

namespace minivllm {

// Per-slot state on the device: one int32 row a slot. The first words are these, the block table
// follows. Floats are stored by their bits.
enum SlotWord : int32_t {
  kLastToken = 0,
  kTemperature = 1,  // float; 0: greedy
  kTopK = 2,         // 0: off
  kTopP = 3,         // float; 1: off
  kMinP = 4,         // float; 0: off
  kRepetitionPenalty = 5,
  kPresencePenalty = 6,
  kFrequencyPenalty = 7,
  kSeedLow = 8,
  kSeedHigh = 9,
  kSample = 10,   // index of the sample among a request's n
  kFlags = 11,    // SlotFlag bits
  kNumBias = 12,  // entries of the slot's row of bias_* in use
  kSlotWords = 16,
};
enum SlotFlag : int32_t {
  kUsesCounts = 1,  // the slot's row of counts is live: penalties read it, the sampler adds to it
  kLeaderSuffices =
      2,  // nothing but the likeliest token is wanted of the slot's logits: see LeadersTo
};

// state[index[i]] = value[i], one entry a pair.
struct UpdateStateParams {
  int32_t* state;        // flat
  const int32_t* pairs;  // [num_pairs, 2]: index, value; an index < 0 or >= size is skipped
  int64_t num_pairs, size;
};

// Copies words to the device from pinned memory of the host, or the other way.
struct CopyWordsParams {
  int32_t* to;
  const int32_t* from;
  int64_t num_words;
};

// What a step of a captured graph leaves for the next one, so that the host need not send it words
// that follow by themselves: each row's token is its next id, its position and length grow by one,
// and the token goes to the host, to row turns[row] of host_tokens, the next one to the row after.
struct StepCounters {
  int32_t* positions;    // [num_rows]; null: nothing of this happens
  int32_t* token_ids;    // [num_rows]: the token
  int32_t* turns;        // [num_rows], in 0 .. num_turns - 1
  int32_t* host_tokens;  // [num_turns, host_stride], pinned memory of the host
  int64_t num_turns, host_stride;
};

// Draws the next token of each row and stores it as the slot's last token.
// logits' = ((logits + bias) with penalties) / temperature, then min-p, top-k, top-p as vLLM
// defines them; the draw is the arg-max of logits' + Gumbel noise keyed by (seed, sample, position,
// token id), never by slot or step. Greedy rows take the arg-max; ties go to the lowest id. A row
// with a NaN, or with no logit above -inf, gives token -1.
struct SampleParams {
  const float* logits;  // [num_rows, vocab_size], rows logits_stride apart; not written
  int64_t logits_stride;
  const int32_t* slots;  // [num_rows], -1: padding, nothing happens
  int32_t* positions;    // [num_rows] position that the new token takes in its sequence;
                         // written where there are counters
  int32_t* state;        // [num_slots, state_stride], SlotWord; kLastToken is written
  int64_t state_stride;
  int32_t* counts;  // [num_slots, vocab_size]: bit 30 = in the prompt, low bits = times generated;
                    // may be null
  // Added to a logit while position < until (min_tokens: value -inf until then; logit_bias: until =
  // INT32_MAX).
  const int32_t* bias_ids;    // [num_slots, max_bias]; may be null
  const float* bias_values;   // [num_slots, max_bias]
  const int32_t* bias_until;  // [num_slots, max_bias]
  int64_t max_bias;
  int32_t* tokens;  // [num_rows] out
  int64_t num_rows, vocab_size;
  const uint64_t* leaders;  // cuda: LeadersTo's, for slots with kLeaderSuffices; may be null
  void* workspace;        // cuda: sample_workspace_size() bytes, zeroed once at creation; cpu: null
  bool settled;           // cuda: slots and state's flags are: see AttentionParams
  StepCounters counters;  // cuda
};

// Log probabilities of the raw logits: of one token a row, its rank (1 = likeliest), and of the
// top_n likeliest, in falling order, ties to the lowest id.
struct LogprobsParams {
  const float* logits;  // [num_rows, vocab_size], rows logits_stride apart
  int64_t logits_stride;
  const int32_t* tokens;  // [num_rows]; a negative token gives NaN and rank 0
  float* logprobs;        // [num_rows]
  int32_t* ranks;         // [num_rows]
  int32_t* top_ids;       // [num_rows, top_n]; may be null where top_n is 0
  float* top_logprobs;    // [num_rows, top_n]
  int64_t num_rows, vocab_size, top_n;
};

// Marks tokens in a slot's row of counts: prompt tokens set bit 30, generated ones add 1. The
// row is zeroed first.
struct CountTokensParams {
  int32_t* counts;           // [vocab_size], the slot's row
  const int32_t* token_ids;  // [num_tokens]
  int64_t num_tokens, num_prompt_tokens, vocab_size;
};

}  // namespace minivllm
