// Sixteen floats in plain C++: the readable reference. Included inside a namespace by each_isa.h.

struct Vec {
  float lane[16];
};

template <class F>
inline Vec each_lane(F f) {
  Vec out;
  for (int i = 0; i < 16; ++i) out.lane[i] = f(i);
  return out;
}

inline Vec set1(float x) {
  return each_lane([&](int) { return x; });
}
inline Vec zero() { return set1(0.0f); }
inline Vec add(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline Vec sub(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline Vec mul(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline Vec div(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.lane[i] / b.lane[i]; });
}
inline Vec fma(const Vec& a, const Vec& b, const Vec& c) {
  return each_lane([&](int i) { return a.lane[i] * b.lane[i] + c.lane[i]; });
}
// b where either is NaN.
inline Vec max(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.lane[i] > b.lane[i] ? a.lane[i] : b.lane[i]; });
}
inline Vec min(const Vec& a, const Vec& b) {
  return each_lane([&](int i) { return a.lane[i] < b.lane[i] ? a.lane[i] : b.lane[i]; });
}

template <class T>
inline Vec load(const T* p) {
  return each_lane([&](int i) { return to_float(p[i]); });
}

// Sixteen pairs: the first and the second of each.
inline void load_pairs(const BFloat16* p, Vec& first, Vec& second) {
  first = each_lane([&](int i) { return to_float(p[2 * i]); });
  second = each_lane([&](int i) { return to_float(p[2 * i + 1]); });
}

template <class T>
inline void store(T* p, const Vec& x) {
  for (int i = 0; i < 16; ++i) p[i] = from_float<T>(x.lane[i]);
}

// x in lanes [0, n), fill in the others.
inline Vec keep_first(const Vec& x, int64_t n, float fill) {
  return each_lane([&](int i) { return i < n ? x.lane[i] : fill; });
}

// 2^n * x for a whole n in [-127, 128].
inline Vec scale_by_power(const Vec& x, const Vec& n) {
  return each_lane([&](int i) {
    const int32_t exponent = n.lane[i] == n.lane[i] ? static_cast<int32_t>(n.lane[i]) + 127 : 0;
    return x.lane[i] * bits_float(static_cast<uint32_t>(exponent) << 23);
  });
}
// For |x| < 2^22: the addition leaves no bits for a fraction.
inline Vec round_even(const Vec& x) {
  return each_lane([&](int i) {
    volatile float shifted = x.lane[i] + 0x1.8p23f;
    return shifted - 0x1.8p23f;
  });
}

inline float sum(const Vec& x) {
  float part[8];
  for (int i = 0; i < 8; ++i) part[i] = x.lane[i] + x.lane[i + 8];
  for (int i = 0; i < 4; ++i) part[i] += part[i + 4];
  return (part[0] + part[2]) + (part[1] + part[3]);
}

// Lane i is the sum of row i of [16, 16], each by the same tree.
inline Vec sum_rows(const float* rows) {
  return each_lane([&](int i) { return sum(load(rows + 16 * i)); });
}

// Rows and blocks of a matrix product's tile.
constexpr int kTileRows = 2, kTileBlocks = 1;
// Blocks that a few rows read at a time.
constexpr int kStreams = 1;

#include "simd_common.h"
