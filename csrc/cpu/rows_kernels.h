// Kernels in which one row is one fixed tree of additions: RMSNorm, RoPE with the KV write, SiLU.
// Compiled once for each instruction set by each_isa.h.

// 1 / sqrt(mean(x^2) + eps)
template <class T>
inline float inverse_rms(const T* x, int64_t n, float eps) {
  Vec squares = zero();
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec v = load_first(x + i, n - i);
    squares = fma(v, v, squares);
  }
  return 1.0f / std::sqrt(sum(squares) / static_cast<float>(n) + eps);
}

template <class T>
void rms_norm_rows(const RmsNormParams& p, int64_t begin, int64_t end) {
  const T* weight = static_cast<const T*>(p.weight);
  for (int64_t row = begin; row < end; ++row) {
    const T* x = static_cast<const T*>(p.x) + row * p.x_stride;
    T* out = static_cast<T*>(p.out) + row * p.hidden_size;
    if (p.residual != nullptr) {
      T* residual = static_cast<T*>(p.residual) + row * p.hidden_size;
      for (int64_t i = 0; i < p.hidden_size; i += kLanes) {
        const int64_t n = p.hidden_size - i;
        store_first(residual + i, add(load_first(residual + i, n), load_first(x + i, n)), n);
      }
      x = residual;
    }
    const Vec scale = set1(inverse_rms(x, p.hidden_size, p.eps));
    for (int64_t i = 0; i < p.hidden_size; i += kLanes) {
      const int64_t n = p.hidden_size - i;
      const Vec normalised = mul(load_first(x + i, n), scale);
      store_first(out + i, mul(normalised, load_first(weight + i, n)), n);
    }
  }
}

void rms_norm(const RmsNormParams& p, int64_t begin, int64_t end) {
  with_dtype(p.dtype, [&](auto tag) { rms_norm_rows<decltype(tag)>(p, begin, end); });
}

// Rotates one head: pairs (i, i + head_dim / 2), after RMSNorm where norm is given.
template <class T>
inline void rotate_head(T* out, const T* x, const float* cos, const T* norm, float eps,
                        int64_t head_dim) {
  const int64_t half = head_dim / 2;
  const Vec scale = set1(norm != nullptr ? inverse_rms(x, head_dim, eps) : 1.0f);
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t n = half - i;
    Vec a = load_first(x + i, n), b = load_first(x + half + i, n);
    if (norm != nullptr) {
      a = mul(mul(a, scale), load_first(norm + i, n));
      b = mul(mul(b, scale), load_first(norm + half + i, n));
    }
    const Vec c = load_first(cos + i, n), s = load_first(cos + half + i, n);
    store_first(out + i, sub(mul(a, c), mul(b, s)), n);
    store_first(out + half + i, add(mul(b, c), mul(a, s)), n);
  }
}

template <class T>
void rope_kv_rows(const RopeKvParams& p, int64_t begin, int64_t end) {
  const int64_t dim = p.kv.head_dim, kv_heads = p.kv.num_kv_heads, block_size = p.kv.block_size;
  for (int64_t t = begin; t < end; ++t) {
    const T* q = static_cast<const T*>(p.qkv) + t * p.qkv_stride;
    const T* k = q + p.num_q_heads * dim;
    const T* v = k + kv_heads * dim;
    const int64_t position = p.positions[t], slot = p.slots[t];
    // A padding row may hold any position; it must not reach outside the table of angles.
    const bool inside = position >= 0 && position < p.max_position;
    const float* cos = p.cos_sin + (inside ? position : 0) * dim;
    T* q_out = static_cast<T*>(p.q_out) + t * p.num_q_heads * dim;
    for (int64_t h = 0; h < p.num_q_heads; ++h) {
      rotate_head(q_out + h * dim, q + h * dim, cos, static_cast<const T*>(p.q_norm), p.eps, dim);
    }
    if (slot < 0 || !inside || position / block_size >= p.kv.max_blocks) continue;
    const int64_t block = p.kv.block_table[slot * p.kv.block_table_stride + position / block_size];
    if (block < 0 || block >= p.kv.num_blocks) continue;
    T* keys = static_cast<T*>(p.kv.cache) + block * 2 * kv_heads * block_size * dim +
              position % block_size * dim;
    T* values = keys + kv_heads * block_size * dim;
    for (int64_t h = 0; h < kv_heads; ++h) {
      rotate_head(keys + h * block_size * dim, k + h * dim, cos, static_cast<const T*>(p.k_norm),
                  p.eps, dim);
      std::memcpy(values + h * block_size * dim, v + h * dim, static_cast<size_t>(dim) * sizeof(T));
    }
  }
}

void rope_kv(const RopeKvParams& p, int64_t begin, int64_t end) {
  with_dtype(p.dtype, [&](auto tag) { rope_kv_rows<decltype(tag)>(p, begin, end); });
}

void silu_mul(const SiluMulParams& p, int64_t begin, int64_t end) {
  with_dtype(p.dtype, [&](auto tag) {
    using T = decltype(tag);
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = static_cast<const T*>(p.x) + row * p.x_stride;
      T* out = static_cast<T*>(p.out) + row * p.size;
      for (int64_t i = 0; i < p.size; i += kLanes) {
        const int64_t n = p.size - i;
        store_first(out + i, mul(silu(load_first(gate + i, n)), load_first(gate + p.size + i, n)),
                    n);
      }
    }
  });
}
