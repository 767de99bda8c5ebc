// Matrix products over packed weights: [blocks of 16 outputs][steps over k][16][values a step],
// zeros where n or k end inside. A step is two values of k for bfloat16 and one otherwise, so that
// a lane is an output, an x is broadcast, and nothing is summed across lanes: the chain over k of
// an output is the same for every number of rows. Compiled once for each instruction set by
// each_isa.h; x comes as float here and as bfloat16 where MINIVLLM_BF16_DOT is 1.

template <class O>
inline void finish(const LinearParams& p, int64_t row, int64_t column, Vec y, const void* bias) {
  O* out = static_cast<O*>(p.out) + row * p.out_stride;
  const int64_t n = p.n - column;
  if (bias != nullptr) {
    with_dtype(p.dtype, [&](auto tag) {
      y = add(y, load_first(static_cast<const decltype(tag)*>(bias) + column, n));
    });
  }
  if (p.epilogue == Epilogue::kResidual) {
    y = add(y, load_first(out + column, n));
  } else if (p.epilogue == Epilogue::kSiluMul) {
    float linear[kLanes], gated[kLanes], products[kLanes] = {};
    store(linear, y);
    store(gated, silu(y));
    for (int i = 0; i < kLanes / 2; ++i) products[i] = gated[2 * i] * linear[2 * i + 1];
    const int64_t half = n < kLanes ? n / 2 : kLanes / 2;
    return store_first(out + column / 2, load(products), half);
  }
  store_first(out + column, y, n);
}

// R rows times B blocks of outputs, all of k.
template <class T, int R, int B>
void tile(const LinearJob& job, int64_t row, int64_t block) {
  constexpr int64_t kValues = std::is_same_v<T, BFloat16> ? 2 : 1;
#if MINIVLLM_BF16_DOT
  using X = BFloat16;
#else
  using X = float;
#endif
  const LinearParams& p = *job.p;
  const T* weight = static_cast<const T*>(p.weight) + block * job.steps * kLanes * kValues;
  const int64_t block_size = job.steps * kLanes * kValues;
  const X* x = static_cast<const X*>(job.x) + row * job.x_stride;
  Vec acc[R][B];
  for (int r = 0; r < R; ++r) {
    for (int b = 0; b < B; ++b) acc[r][b] = zero();
  }
  const int64_t whole_steps = MINIVLLM_BF16_DOT ? p.k / 2 : job.steps;
  int64_t step = 0;
  // The hardware's own prefetcher stops at the end of each page of 4 KiB.
  constexpr int64_t kAhead = 4096 / sizeof(T);
  const bool prefetch = row == 0 && B <= kStreams;
#pragma GCC unroll 4
  for (; step < whole_steps; ++step) {
    const T* w = weight + step * kLanes * kValues;
    if (prefetch && B == 1) {
      __builtin_prefetch(w + kAhead);
    } else if (prefetch) {  // the next blocks, in the order of memory
      for (int b = 0; b < B; ++b) {
        __builtin_prefetch(weight + B * block_size + (step * B + b) * kLanes * kValues, 0, 2);
      }
    }
#if MINIVLLM_BF16_DOT
    __m512bh wide[B];
    for (int b = 0; b < B; ++b) wide[b] = (__m512bh)_mm512_loadu_si512(w + b * block_size);
    for (int r = 0; r < R; ++r) {
      int32_t pair;
      std::memcpy(&pair, x + r * job.x_stride + 2 * step, sizeof pair);
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int b = 0; b < B; ++b) acc[r][b] = _mm512_dpbf16_ps(acc[r][b], wide[b], both);
    }
#else
    if constexpr (kValues == 2) {
      Vec first[B], second[B];
      for (int b = 0; b < B; ++b) load_pairs(w + b * block_size, first[b], second[b]);
      for (int r = 0; r < R; ++r) {
        const float* pair = x + r * job.x_stride + 2 * step;
        const Vec x0 = set1(pair[0]), x1 = set1(pair[1]);
        for (int b = 0; b < B; ++b) acc[r][b] = fma(first[b], x0, acc[r][b]);
        for (int b = 0; b < B; ++b) acc[r][b] = fma(second[b], x1, acc[r][b]);
      }
    } else {
      Vec wide[B];
      for (int b = 0; b < B; ++b) wide[b] = load(w + b * block_size);
      for (int r = 0; r < R; ++r) {
        const Vec x0 = set1(x[r * job.x_stride + step]);
        for (int b = 0; b < B; ++b) acc[r][b] = fma(wide[b], x0, acc[r][b]);
      }
    }
#endif
  }
#if MINIVLLM_BF16_DOT
  if (step < job.steps) {  // k is odd: the last pair is half a pair
    for (int r = 0; r < R; ++r) {
      const __m512bh half = (__m512bh)_mm512_set1_epi32(x[r * job.x_stride + p.k - 1].bits);
      for (int b = 0; b < B; ++b) {
        const T* w = weight + b * block_size + step * kLanes * kValues;
        acc[r][b] = _mm512_dpbf16_ps(acc[r][b], (__m512bh)_mm512_loadu_si512(w), half);
      }
    }
  }
#endif
  for (int r = 0; r < R; ++r) {
    for (int b = 0; b < B; ++b) {
      const int64_t out_row = job.first_row + row + r, column = (block + b) * kLanes;
      if (p.out_dtype == p.dtype) {
        finish<T>(p, out_row, column, acc[r][b], p.bias);
      } else {
        finish<float>(p, out_row, column, acc[r][b], p.bias);
      }
    }
  }
}

// rows <= R rows of B blocks.
template <class T, int R, int B>
inline void narrow_tile(const LinearJob& job, int64_t rows, int64_t row, int64_t block) {
  if (rows == R) {
    tile<T, R, B>(job, row, block);
  } else if constexpr (R > 1) {
    narrow_tile<T, R - 1, B>(job, rows, row, block);
  }
}

// Very few rows stream the blocks once in the order of memory; a few take kStreams blocks at a
// time, whose chains are enough to hide the latency of a product; many rows work on kTileBlocks
// blocks that stay in the cache, with as many accumulators as there are registers.
template <class T>
void linear_blocks(const LinearJob& job, int64_t begin, int64_t end) {
  const int64_t whole_rows = job.num_rows / kTileRows * kTileRows;
  const int64_t rest = job.num_rows - whole_rows;
  int64_t block = begin;
  if (whole_rows > kTileRows) {
    for (; block + kTileBlocks <= end; block += kTileBlocks) {
      for (int64_t row = 0; row < whole_rows; row += kTileRows) {
        tile<T, kTileRows, kTileBlocks>(job, row, block);
      }
      for (int64_t b = 0; rest > 0 && b < kTileBlocks; ++b) {
        narrow_tile<T, kTileRows, 1>(job, rest, whole_rows, block + b);
      }
    }
  }
  const int64_t streams_end = job.num_rows > kTileRows / 2 ? end : begin;
  for (; block + kStreams <= streams_end; block += kStreams) {
    for (int64_t row = 0; row < whole_rows; row += kTileRows) {
      tile<T, kTileRows, kStreams>(job, row, block);
    }
    if (rest > 0) narrow_tile<T, kTileRows, kStreams>(job, rest, whole_rows, block);
  }
  for (; block < end; ++block) {
    for (int64_t row = 0; row < whole_rows; row += kTileRows) {
      tile<T, kTileRows, 1>(job, row, block);
    }
    if (rest > 0) narrow_tile<T, kTileRows, 1>(job, rest, whole_rows, block);
  }
}

void linear(const LinearJob& job, int64_t begin, int64_t end) {
#if MINIVLLM_BF16_DOT
  linear_blocks<BFloat16>(job, begin, end);
#else
  with_dtype(job.p->dtype, [&](auto tag) { linear_blocks<decltype(tag)>(job, begin, end); });
#endif
}
