// Draws the next token of each row: sampling_math.h says what a draw means.
//
// A row of logits is divided into slices, one block each; the fewer rows, the more slices. Blocks
// find the best score of their slice (greedy: the logit itself; else the logit over the temperature
// plus noise) and the last block of a row to end merges them: an arg-max of exact scores, so that
// the division never shows. Rows with top-k, top-p or min-p get their largest logit from that
// pass; then the last block alone reads the row again, from L2:
//   1. a histogram over the distance to the largest logit finds the bin where a cut falls;
//   2. the tokens up to that bin move to shared memory, if they fit;
//   3. radix digits inside the bin find the very token where the cut falls (select.cuh);
//   4. what is left is scored.
// The launch depends on the number of rows and the vocabulary alone; a row's path is read from its
// state. A row with kLeaderSuffices has one block at work, which takes the first of its leaders;
// where flags are settled the others have left before the logits' product ends.
// Assumes: a counter of zero for each row in the workspace, which the last block resets.
#include <algorithm>

#include "common.cuh"
#include "sampling_row.cuh"
#include "select.cuh"

namespace minivllm::cuda {
namespace {

using namespace draws;
using sampling::CutKind;
using sampling::order_of;
using sampling::Range;
using sampling::Words;

constexpr int kSliceUnit = kThreads * kQuad;  // tokens: one quad a thread
constexpr int kTargetBlocks = 512;            // a wave of the largest cards
constexpr int kMaxRows = 1024;                // rows a launch: where the workspace's counters end

template <bool kAligned>
__device__ Partial score_slice(const Row<kAligned>& row, int32_t begin, int32_t end,
                               Shared& shared) {
  bool has_nan = false;
  if (row.settings.greedy() || row.settings.cuts()) {
    float largest = -INFINITY;
    int32_t id = -1;
    row.for_each_quad(
        begin, end,
        [&](int32_t quad, const float (&values)[kQuad]) {
#pragma unroll
          for (int i = 0; i < kQuad; ++i) {
            has_nan |= values[i] != values[i];
            if (values[i] > largest) {
              largest = values[i];
              id = quad * kQuad + i;
            }
          }
        },
        [] {});
    Best best;
    best.score = largest;
    best.id = id;
    return reduce_block(best, has_nan, shared);
  }
  Scorer scorer(row.settings);
  row.for_each_quad(
      begin, end,
      [&](int32_t quad, const float (&values)[kQuad]) {
        const Words words = sampling::noise_words(row.settings, row.position, quad);
#pragma unroll
        for (int i = 0; i < kQuad; ++i) {
          has_nan |= values[i] != values[i];
          scorer.take(values[i], quad * kQuad + i, words.word[i]);
        }
      },
      [&] { scorer.share(); });
  return reduce_block(scorer.best, has_nan, shared);
}

// The tokens of a row that are within range and not cut off: the row itself, or a list in shared
// memory that holds them all.
template <bool kAligned>
struct Candidates {
  const Row<kAligned>& row;
  const Range range;
  Shared& shared;
  uint64_t last = sampling::kEverything;
  bool listed = false;

  // f(logit, id, distance).
  template <typename F>
  __device__ void for_each(F f) const {
    const auto visit = [&](float logit, int32_t id) {
      const float distance = range.distance(logit);
      if (range.holds(distance) && order_of(logit, id) <= last) f(logit, id, distance);
    };
    if (listed) {
      for (int i = threadIdx.x; i < shared.num_listed; i += kThreads) {
        visit(shared.listed_logits[i], shared.listed_ids[i]);
      }
      return;
    }
    row.for_each_quad(
        0, (row.vocab_size + kQuad - 1) / kQuad,
        [&](int32_t quad, const float (&values)[kQuad]) {
#pragma unroll
          for (int i = 0; i < kQuad; ++i) visit(values[i], quad * kQuad + i);
        },
        [] {});
  }

  // Moves the tokens up to a bin to shared memory, if they fit.
  __device__ void list_up_to(int bin) {
    if (threadIdx.x == 0) shared.num_listed = 0;
    __syncthreads();
    for_each([&](float logit, int32_t id, float distance) {
      if (Range::bin(distance) > bin) return;
      const int place = atomicAdd(&shared.num_listed, 1);
      if (place < kMaxListed) {
        shared.listed_logits[place] = logit;
        shared.listed_ids[place] = id;
      }
    });
    __syncthreads();
    listed = shared.num_listed <= kMaxListed;
  }

  __device__ void cut(CutKind kind) {
    Histogram& histogram = shared.histogram;
    histogram.clear();
    for_each([&](float, int32_t, float distance) {
      const uint64_t amount = sampling::amount_of(kind, distance);
      if (amount > 0) histogram.add(Range::bin(distance), amount);
    });
    const Crossing crossing = histogram.find<kThreads>(
        [&](uint64_t total) { return sampling::target_of(kind, row.settings, total); });
    if (crossing.bin < 0) return;
    if (!listed) list_up_to(crossing.bin);
    last = last_wanted<kThreads>(histogram, crossing.missing, [&](auto add) {
      for_each([&](float logit, int32_t id, float distance) {
        if (Range::bin(distance) != crossing.bin) return;
        add(order_of(logit, id), sampling::amount_of(kind, distance));
      });
    });
  }
};

// Not inlined: the pass over a slice, which every row takes, keeps its registers.
template <bool kAligned>
__device__ __noinline__ int32_t draw_from_kept(const Row<kAligned>& row, float peak,
                                               Shared& shared) {
  Candidates<kAligned> candidates{row, Range(row.settings, peak), shared};
#pragma unroll 1
  for (int kind = 0; kind < 2; ++kind) {
    const auto cut = static_cast<CutKind>(kind);
    if (sampling::applies(cut, row.settings)) candidates.cut(cut);
  }
  Scorer scorer(row.settings);
  candidates.for_each([&](float logit, int32_t id, float) {
    const Words words = sampling::noise_words(row.settings, row.position, id / kQuad);
    const int i = id % kQuad;
    const uint32_t low = i % 2 == 0 ? words.word[0] : words.word[1];
    const uint32_t high = i % 2 == 0 ? words.word[2] : words.word[3];
    scorer.take(logit, id, i < 2 ? low : high);
  });
  return reduce_block(scorer.best, false, shared).id;
}

// Publishes a slice's result; true in the last block of the row to do so, which then gets the
// row's result.
__device__ bool merge_slices(Partial& result, Partial* partials, unsigned* counter, int slice,
                             int num_slices, Shared& shared) {
  if (num_slices == 1) return true;
  if (threadIdx.x == 0) {
    partials[slice] = result;
    __threadfence();
    // Wraps to 0 at the last block: the counter is ready for the next launch.
    shared.is_last = atomicInc(counter, num_slices - 1) == static_cast<unsigned>(num_slices - 1);
    __threadfence();
  }
  __syncthreads();
  if (!shared.is_last) return false;
  Best best;
  bool has_nan = false;
  for (int i = threadIdx.x; i < num_slices; i += kThreads) {
    const int4 bits = __ldcg(reinterpret_cast<const int4*>(partials + i));
    best.take(__hiloint2double(bits.y, bits.x), bits.z);
    has_nan |= bits.w != 0;
  }
  result = reduce_block(best, has_nan, shared);
  return true;
}

// The token of a row whose leaders suffice, or -1. All threads get it.
__device__ int32_t first_of_leaders(const uint64_t* leaders, int64_t count, Shared& shared) {
  uint64_t first = sampling::kEverything;
  for (int64_t start = threadIdx.x; start < count; start += kUnroll * kThreads) {
    uint64_t found[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const int64_t i = start + u * kThreads;
      found[u] = i < count ? __ldcg(leaders + i) : sampling::kEverything;
    }
#pragma unroll
    for (const uint64_t leader : found) first = min(first, leader);
  }
#pragma unroll
  for (int offset = kWarpSize / 2; offset > 0; offset /= 2)
    first = min(first, __shfl_xor_sync(kFullMask, first, offset));
  if (threadIdx.x % kWarpSize == 0) shared.warp_leaders[threadIdx.x / kWarpSize] = first;
  __syncthreads();
  for (const uint64_t other : shared.warp_leaders) first = min(first, other);
  // 0 tells of a NaN; nothing is below minus infinity.
  return first == 0 || first >= order_of(-INFINITY, 0) ? -1 : static_cast<int32_t>(first);
}

// By one thread of the row's last block, when nobody reads its position any more.
__device__ void store_token(const SampleParams& p, int64_t row, int32_t* state, int32_t token) {
  p.tokens[row] = state[kLastToken] = token;
  const StepCounters& c = p.counters;
  if (c.positions == nullptr) return;
  const int32_t turn = c.turns[row];
  if (turn >= 0 && turn < c.num_turns) c.host_tokens[turn * c.host_stride + row] = token;
  c.turns[row] = turn + 1 < c.num_turns ? turn + 1 : 0;
  c.token_ids[row] = token;
  ++c.positions[row];
  ++p.positions[row];
}

struct Grid {
  int num_slices;
  int quads_per_slice;
};

template <bool kAligned>
__global__ void __launch_bounds__(kThreads, 2) sample_kernel(SampleParams p, Grid grid) {
  __shared__ Shared shared;
  __shared__ Row<kAligned> row;
  pdl_launch_dependents();
  if (!p.settled) pdl_wait();
  const int64_t row_index = blockIdx.x % p.num_rows;
  const int slice = static_cast<int>(blockIdx.x / p.num_rows);
  const int32_t slot = load_settled(p.slots + row_index);
  int32_t* const state = p.state + slot * p.state_stride;
  const bool leader_suffices =
      p.leaders != nullptr && slot >= 0 && (load_settled(state + kFlags) & kLeaderSuffices) != 0;
  if (slice > 0 && (slot < 0 || leader_suffices)) return;
  pdl_wait();  // in the first block of every row, so that the kernels before are over with this one
  if (slot < 0) return;
  if (leader_suffices) {
    const int64_t count = sampling::num_leaders(p.vocab_size);
    const int32_t token = first_of_leaders(p.leaders + row_index * count, count, shared);
    if (threadIdx.x == 0) store_token(p, row_index, state, token);
    return;
  }
  row.open(p, row_index, slot);

  const int32_t num_quads = (row.vocab_size + kQuad - 1) / kQuad;
  const int32_t begin = slice * grid.quads_per_slice;
  const int32_t end = min(begin + grid.quads_per_slice, num_quads);
  Partial result = score_slice(row, begin, end, shared);

  auto* counters = static_cast<unsigned*>(p.workspace);
  auto* partials = reinterpret_cast<Partial*>(counters + kMaxRows);
  if (!merge_slices(result, partials + row_index * grid.num_slices, counters + row_index, slice,
                    grid.num_slices, shared)) {
    return;
  }
  int32_t token = result.has_nan ? -1 : result.id;
  const auto peak = static_cast<float>(result.score);
  if (token >= 0 && row.settings.cuts() && peak < INFINITY) {
    token = draw_from_kept(row, peak, shared);
  }
  if (threadIdx.x == 0) {
    store_token(p, row_index, state, token);
    if (row.adjustments.counts != nullptr && token >= 0) {
      ++p.counts[slot * p.vocab_size + token];
    }
  }
}

Grid grid_for(int64_t num_rows, int64_t vocab_size) {
  const int64_t most = (vocab_size + kSliceUnit - 1) / kSliceUnit;
  const int64_t wanted = std::clamp<int64_t>(kTargetBlocks / num_rows, 1, most);
  const int64_t units = (most + wanted - 1) / wanted;
  return {static_cast<int>((most + units - 1) / units),
          static_cast<int>(units * kSliceUnit / kQuad)};
}

}  // namespace

int64_t sample_workspace_size(int64_t max_rows, int64_t vocab_size) {
  int64_t most_partials = 0;
  for (int64_t rows = 1; rows <= std::min<int64_t>(max_rows, kMaxRows); ++rows) {
    most_partials = std::max(most_partials, rows * grid_for(rows, vocab_size).num_slices);
  }
  return kMaxRows * static_cast<int64_t>(sizeof(unsigned)) +
         most_partials * static_cast<int64_t>(sizeof(Partial));
}

void sample(const SampleParams& p, Stream stream) {
  if (p.num_rows == 0) return;
  if (p.workspace == nullptr) throw std::invalid_argument("sample: workspace is null");
  if (p.vocab_size < 1 || p.vocab_size > sampling::kMaxVocabSize) {
    throw std::invalid_argument("sample: vocab_size " + std::to_string(p.vocab_size) +
                                " is not in [1, " + std::to_string(sampling::kMaxVocabSize) + "]");
  }
  const bool aligned =
      reinterpret_cast<uintptr_t>(p.logits) % sizeof(float4) == 0 && p.logits_stride % kQuad == 0;
  const auto kernel = aligned ? sample_kernel<true> : sample_kernel<false>;
  for (int64_t start = 0; start < p.num_rows; start += kMaxRows) {
    SampleParams part = p;
    part.logits += start * p.logits_stride;
    part.slots += start;
    part.positions += start;
    part.tokens += start;
    if (part.counters.positions != nullptr) {
      part.counters.positions += start;
      part.counters.token_ids += start;
      part.counters.turns += start;
      part.counters.host_tokens += start;
    }
    if (p.leaders != nullptr) part.leaders += start * sampling::num_leaders(p.vocab_size);
    part.num_rows = std::min<int64_t>(p.num_rows - start, kMaxRows);
    const Grid grid = grid_for(part.num_rows, p.vocab_size);
    const auto blocks = static_cast<unsigned>(part.num_rows * grid.num_slices);
    MINIVLLM_LAUNCH(kernel, dim3(blocks), dim3(kThreads), 0, stream, part, grid);
  }
}

}  // namespace minivllm::cuda
