// Sixteen floats in two registers. Included inside a namespace by each_isa.h.

struct Vec {
  __m256 a, b;  // lanes 0 .. 7, lanes 8 .. 15
};

inline Vec set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline Vec zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Vec add(Vec x, Vec y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Vec sub(Vec x, Vec y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Vec mul(Vec x, Vec y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Vec div(Vec x, Vec y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Vec fma(Vec x, Vec y, Vec z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
// y where either is NaN.
inline Vec max(Vec x, Vec y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline Vec min(Vec x, Vec y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }

inline Vec load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline __m256 widen(const BFloat16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline __m256 widen(const Float16* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Vec load(const BFloat16* p) { return {widen(p), widen(p + 8)}; }
inline Vec load(const Float16* p) { return {widen(p), widen(p + 8)}; }

// Sixteen pairs: the first and the second of each.
inline void load_pairs(const BFloat16* p, Vec& first, Vec& second) {
  const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  const __m256i b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 16));
  const __m256i top = _mm256_set1_epi32(-65536);
  first = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)),
           _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  second = {_mm256_castsi256_ps(_mm256_and_si256(a, top)),
            _mm256_castsi256_ps(_mm256_and_si256(b, top))};
}

inline void store(float* p, Vec x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline __m256i round_to_bfloat16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  return _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
}
inline void store(BFloat16* p, Vec x) {
  // packus works within 128-bit parts; the permute puts the parts in order.
  const __m256i packed = _mm256_packus_epi32(round_to_bfloat16(x.a), round_to_bfloat16(x.b));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
inline void store(Float16* p, Vec x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, 0));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, 0));
}

// x in lanes [0, n), fill in the others.
inline Vec keep_first(Vec x, int64_t n, float fill) {
  if (n >= 16) return x;
  const __m256i count = _mm256_set1_epi32(static_cast<int>(n));
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 keep_a = _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lanes));
  const __m256 keep_b =
      _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_sub_epi32(count, _mm256_set1_epi32(8)), lanes));
  return {_mm256_blendv_ps(_mm256_set1_ps(fill), x.a, keep_a),
          _mm256_blendv_ps(_mm256_set1_ps(fill), x.b, keep_b)};
}

// 2^n * x for a whole n in [-127, 128].
inline Vec scale_by_power(Vec x, Vec n) {
  const __m256i bias = _mm256_set1_epi32(127);
  const __m256i a = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.a), bias), 23);
  const __m256i b = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n.b), bias), 23);
  return {_mm256_mul_ps(x.a, _mm256_castsi256_ps(a)), _mm256_mul_ps(x.b, _mm256_castsi256_ps(b))};
}
inline Vec round_even(Vec x) {
  return {_mm256_round_ps(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
          _mm256_round_ps(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}

inline float sum(Vec x) {
  const __m256 a = _mm256_add_ps(x.a, x.b);
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

// Lanes 0 .. 7 are the sums of rows 0 .. 7 of [8, 16].
inline __m256 sum_eight_rows(const float* rows) {
  __m256 r[8];
  for (int i = 0; i < 8; ++i) {
    const Vec x = load(rows + 16 * i);
    r[i] = _mm256_add_ps(x.a, x.b);
  }
  const __m256 s0 = _mm256_hadd_ps(_mm256_hadd_ps(r[0], r[1]), _mm256_hadd_ps(r[2], r[3]));
  const __m256 s1 = _mm256_hadd_ps(_mm256_hadd_ps(r[4], r[5]), _mm256_hadd_ps(r[6], r[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(s0, s1, 0x20), _mm256_permute2f128_ps(s0, s1, 0x31));
}

// Lane i is the sum of row i of [16, 16], each by the same tree.
inline Vec sum_rows(const float* rows) {
  return {sum_eight_rows(rows), sum_eight_rows(rows + 128)};
}

// Rows and blocks of a matrix product's tile: 8 accumulators, 4 weights, 2 x of 16 registers.
constexpr int kTileRows = 4, kTileBlocks = 1;
// Blocks that a few rows read at a time.
constexpr int kStreams = 1;

#include "simd_common.h"
