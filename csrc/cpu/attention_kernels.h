// Online softmax over tiles of keys at absolute positions. A row is one query head of one new
// token; the rows of a group share the key head, so they share the tiles, but a row's arithmetic
// is its own: it is the same whichever rows stand beside it. Compiled once for each instruction
// set by each_isa.h.

// Where the key (part 0) or value (part 1) of a position lies, and how many more follow it in its
// block.
template <class T>
inline const T* find_key(const AttentionParams& p, int64_t slot, int64_t head, int64_t part,
                         int64_t position, int64_t& following) {
  const KvCache& kv = p.kv;
  const int64_t index = position / kv.block_size, offset = position % kv.block_size;
  const int64_t block =
      index < kv.max_blocks ? kv.block_table[slot * kv.block_table_stride + index] : int64_t{-1};
  if (block < 0 || block >= kv.num_blocks) {
    throw std::out_of_range("attention: the block table has no block for a key");
  }
  following = kv.block_size - offset;
  return static_cast<const T*>(kv.cache) +
         (((block * 2 + part) * kv.num_kv_heads + head) * kv.block_size + offset) * kv.head_dim;
}

// n keys or values from position first of a sequence, as float [n, width], zeros from head_dim to
// width. Nothing past them is read: it may never have been written.
template <class T>
void load_tile(float* tile, const AttentionParams& p, int64_t slot, int64_t head, int64_t part,
               int64_t first, int64_t n, int64_t width) {
  const int64_t head_dim = p.kv.head_dim;
  for (int64_t j = 0; j < n;) {
    int64_t run;
    const T* from = find_key<T>(p, slot, head, part, first + j, run);
    for (const int64_t end = j + run < n ? j + run : n; j < end; ++j, from += head_dim) {
      for (int64_t i = 0; i < head_dim; i += kLanes) {
        store(tile + j * width + i, load_first(from + i, head_dim - i));
      }
    }
  }
}

// Asks for what load_tile will read: blocks lie anywhere, so the hardware cannot guess.
template <class T>
void prefetch_tile(const AttentionParams& p, int64_t slot, int64_t head, int64_t part,
                   int64_t first, int64_t n) {
  constexpr int64_t kLine = 64 / sizeof(T);
  for (int64_t j = 0, run; j < n; j += run) {
    const T* from = find_key<T>(p, slot, head, part, first + j, run);
    const int64_t size = (run < n - j ? run : n - j) * p.kv.head_dim;
    for (int64_t i = 0; i < size; i += kLine) __builtin_prefetch(from + i, 0, 2);
  }
}

// scores[j] = q . keys[j] * scale for j < 16 keys of a tile.
inline Vec score_sixteen(const float* q, const float* keys, int64_t width, Vec scale) {
  alignas(64) float products[kLanes * kLanes];
  for (int j = 0; j < kLanes; j += 4) {
    Vec acc[4];
    const Vec first = load(q);
    for (int i = 0; i < 4; ++i) acc[i] = mul(first, load(keys + (j + i) * width));
    for (int64_t d = kLanes; d < width; d += kLanes) {
      const Vec part = load(q + d);
      for (int i = 0; i < 4; ++i) acc[i] = fma(part, load(keys + (j + i) * width + d), acc[i]);
    }
    for (int i = 0; i < 4; ++i) store(products + (j + i) * kLanes, acc[i]);
  }
  return mul(sum_rows(products), scale);
}

inline float largest(Vec x) {
  float lane[kLanes];
  store(lane, x);
  float best = lane[0];
  // A NaN wins, so that it reaches the output.
  for (int i = 1; i < kLanes; ++i) best = lane[i] > best || lane[i] != lane[i] ? lane[i] : best;
  return best;
}

// acc[N * 16] = acc * decay + sum over j of weights[j] * values[j].
template <int N>
inline void add_values(float* acc, const float* weights, const float* values, int64_t n,
                       int64_t width, Vec decay) {
  Vec sums[N];
  for (int i = 0; i < N; ++i) sums[i] = mul(load(acc + i * kLanes), decay);
  for (int64_t j = 0; j < n; ++j) {
    const Vec weight = set1(weights[j]);
    for (int i = 0; i < N; ++i) {
      sums[i] = fma(weight, load(values + j * width + i * kLanes), sums[i]);
    }
  }
  for (int i = 0; i < N; ++i) store(acc + i * kLanes, sums[i]);
}

template <class T>
void attend_rows(const AttentionParams& p, const AttentionItem& item) {
  const int64_t dim = p.kv.head_dim, width = ceil_div(dim, kLanes) * kLanes;
  const int64_t group = p.num_q_heads / p.kv.num_kv_heads, slot = p.slots[item.seq];
  const int64_t rows = item.row_end - item.row_begin;
  alignas(64) float tile[kTileKeys * kMaxHeadDim];
  alignas(64) float q[kItemRows * kMaxHeadDim], acc[kItemRows * kMaxHeadDim];
  alignas(64) float weights[kItemRows * kTileKeys];
  float highest[kItemRows], total[kItemRows];
  Vec decay[kItemRows];

  // Where row r of the item lies in q and out, and the keys that it sees.
  const auto offset = [&](int64_t r) {
    const int64_t row = item.row_begin + r;
    return ((item.first_token + row / group) * p.num_q_heads + item.kv_head * group + row % group) *
           dim;
  };
  const auto num_keys = [&](int64_t r) {
    return item.first_position + (item.row_begin + r) / group + 1;
  };

  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < width; i += kLanes) {
      store(q + r * width + i, load_first(static_cast<const T*>(p.q) + offset(r) + i, dim - i));
      store(acc + r * width + i, zero());
    }
    highest[r] = -INFINITY;
    total[r] = 0.0f;
  }
  const Vec scale = set1(p.scale * 1.44269504f);  // exp(x) = 2^(x log2(e))
  const int64_t end = num_keys(rows - 1);
  prefetch_tile<T>(p, slot, item.kv_head, 1, 0, end < kTileKeys ? end : kTileKeys);
  for (int64_t first = 0; first < end; first += kTileKeys) {
    const int64_t n = end - first < kTileKeys ? end - first : kTileKeys;
    load_tile<T>(tile, p, slot, item.kv_head, 0, first, n, width);
    const int64_t next = first + kTileKeys;
    if (next < end) {
      const int64_t next_n = end - next < kTileKeys ? end - next : kTileKeys;
      prefetch_tile<T>(p, slot, item.kv_head, 0, next, next_n);
      prefetch_tile<T>(p, slot, item.kv_head, 1, next, next_n);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t seen = num_keys(r) - first;
      if (seen <= 0) continue;
      float* row_weights = weights + r * kTileKeys;
      const int64_t parts = seen < kTileKeys ? ceil_div(seen, kLanes) : kTileKeys / kLanes;
      Vec scores[kTileKeys / kLanes];
      Vec best = set1(highest[r]);
      for (int64_t i = 0; i < parts; ++i) {
        scores[i] = score_sixteen(q + r * width, tile + i * kLanes * width, width, scale);
        scores[i] = keep_first(scores[i], seen - i * kLanes, -INFINITY);
        best = max(best, scores[i]);
      }
      const float new_highest = largest(best);
      const Vec shift = set1(new_highest);
      Vec sums = zero();
      for (int64_t i = 0; i < parts; ++i) {
        const Vec weight = exp2(sub(scores[i], shift));
        store(row_weights + i * kLanes, weight);
        sums = add(sums, weight);
      }
      decay[r] = exp2(sub(set1(highest[r]), shift));
      float first_lane[kLanes];
      store(first_lane, decay[r]);
      total[r] = total[r] * first_lane[0] + sum(sums);
      highest[r] = new_highest;
    }
    load_tile<T>(tile, p, slot, item.kv_head, 1, first, n, width);
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t seen = num_keys(r) - first < n ? num_keys(r) - first : n;
      if (seen <= 0) continue;
      const float* row_weights = weights + r * kTileKeys;
      int64_t i = 0;
      for (; i + 4 * kLanes <= width; i += 4 * kLanes) {
        add_values<4>(acc + r * width + i, row_weights, tile + i, seen, width, decay[r]);
      }
      for (; i < width; i += kLanes) {
        add_values<1>(acc + r * width + i, row_weights, tile + i, seen, width, decay[r]);
      }
    }
  }
  for (int64_t r = 0; r < rows; ++r) {
    const Vec inverse = set1(1.0f / total[r]);
    for (int64_t i = 0; i < width; i += kLanes) {
      store_first(static_cast<T*>(p.out) + offset(r) + i, mul(load(acc + r * width + i), inverse),
                  dim - i);
    }
  }
}

void attend(const AttentionParams& p, const AttentionItem& item) {
  with_dtype(p.dtype, [&](auto tag) { attend_rows<decltype(tag)>(p, item); });
}
