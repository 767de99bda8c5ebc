// What is the same for every width of registers. Included inside a namespace by each_isa.h.

constexpr int64_t kLanes = 16;

// n <= 16 elements, zeros behind them; never reads past them.
template <class T>
inline Vec load_first(const T* p, int64_t n) {
  if (n >= kLanes) return load(p);
  T padded[kLanes] = {};
  std::memcpy(padded, p, static_cast<size_t>(n) * sizeof(T));
  return load(padded);
}

// Stores n <= 16 elements; never writes past them.
template <class T>
inline void store_first(T* p, Vec x, int64_t n) {
  if (n >= kLanes) return store(p, x);
  T padded[kLanes];
  store(padded, x);
  std::memcpy(p, padded, static_cast<size_t>(n) * sizeof(T));
}

// 2^x within 2 ulp; 0 below -127, infinity from 128 on, NaN for NaN.
inline Vec exp2(Vec x) {
  x = max(set1(-127.0f), min(set1(128.0f), x));
  const Vec n = round_even(x);
  const Vec f = sub(x, n);  // in [-1/2, 1/2]
  // The Taylor series of 2^f: ln(2)^i / i!.
  Vec y = set1(1.5403530e-4f);
  y = fma(y, f, set1(1.3333558e-3f));
  y = fma(y, f, set1(9.6181291e-3f));
  y = fma(y, f, set1(5.5504109e-2f));
  y = fma(y, f, set1(2.4022651e-1f));
  y = fma(y, f, set1(6.9314718e-1f));
  y = fma(y, f, set1(1.0f));
  return scale_by_power(y, n);
}

// x / (1 + e^-x)
inline Vec silu(Vec x) { return div(x, add(set1(1.0f), exp2(mul(x, set1(-1.44269504f))))); }
