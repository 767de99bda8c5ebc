// Sixteen floats in one register. Included inside a namespace by each_isa.h.

using Vec = __m512;

inline Vec zero() { return _mm512_setzero_ps(); }
inline Vec set1(float x) { return _mm512_set1_ps(x); }
inline Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
inline Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
inline Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
inline Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
// b where either is NaN.
inline Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }

inline Vec load(const float* p) { return _mm512_loadu_ps(p); }
inline Vec load(const BFloat16* p) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vec load(const Float16* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}

// Sixteen pairs: the first and the second of each.
inline void load_pairs(const BFloat16* p, Vec& first, Vec& second) {
  const __m512i bits = _mm512_loadu_si512(p);
  first = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  second = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(-65536)));
}

inline void store(float* p, Vec x) { _mm512_storeu_ps(p, x); }
inline void store(BFloat16* p, Vec x) {
  const __m512i bits = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __m512i top = _mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(top));
}
inline void store(Float16* p, Vec x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x, 0));
}

// x in lanes [0, n), fill in the others.
inline Vec keep_first(Vec x, int64_t n, float fill) {
  return n >= 16 ? x : _mm512_mask_mov_ps(set1(fill), static_cast<__mmask16>((1u << n) - 1), x);
}

// 2^n * x for a whole n.
inline Vec scale_by_power(Vec x, Vec n) { return _mm512_scalef_ps(x, n); }
inline Vec round_even(Vec x) { return _mm512_roundscale_ps(x, 0); }

// Lane i is the sum of row i of [16, 16], each by the same tree.
inline Vec sum_rows(const float* rows) {
  __m512 a[8];
  for (int i = 0; i < 8; ++i) {
    const __m512 x = load(rows + 32 * i), y = load(rows + 32 * i + 16);
    a[i] = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
  }
  // a[i], each 128-bit part: row 2i, row 2i + 1, row 2i, row 2i + 1 (two partial sums of each).
  __m512 b[4];
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm512_add_ps(_mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0x44),
                         _mm512_shuffle_ps(a[2 * i], a[2 * i + 1], 0xee));
  }
  // b[i], each 128-bit part: rows 4i .. 4i + 3; the four parts remain to be added.
  __m512 c[2];
  for (int i = 0; i < 2; ++i) {
    c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x44),
                         _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xee));
  }
  // c[i], parts: rows 8i.., 8i.., 8i + 4.., 8i + 4..
  return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88),
                       _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

inline float sum(Vec x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
  const __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 c = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}

// Rows and blocks of a matrix product's tile: 24 accumulators, 3 weights, one x of 32 registers.
constexpr int kTileRows = 8, kTileBlocks = 3;
// Blocks that a few rows read at a time.
constexpr int kStreams = 2;

#include "simd_common.h"
