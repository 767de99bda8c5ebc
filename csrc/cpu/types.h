// Half-precision element types and their conversions, round to nearest even.
#pragma once

#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "../kernels.h"

namespace minivllm::cpu {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline uint32_t float_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}

inline float bits_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

inline float to_float(float x) { return x; }

inline float to_float(BFloat16 x) { return bits_float(static_cast<uint32_t>(x.bits) << 16); }

inline float to_float(Float16 x) {
  const uint32_t sign = (x.bits & 0x8000u) << 16;
  uint32_t bits = (x.bits & 0x7fffu) << 13;
  if (bits >= 0x0f800000u) {  // infinity or NaN: the exponent is all ones
    bits |= 0x7f800000u;
  } else if (bits >= 0x00800000u) {
    bits += (127u - 15u) << 23;
  } else {  // a subnormal is mantissa * 2^-24
    bits = float_bits(static_cast<float>(x.bits & 0x3ffu) * 0x1p-24f);
  }
  return bits_float(bits | sign);
}

template <class T>
T from_float(float x);

template <>
inline float from_float<float>(float x) {
  return x;
}

template <>
inline BFloat16 from_float<BFloat16>(float x) {
  const uint32_t bits = float_bits(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
inline Float16 from_float<Float16>(float x) {
  const uint32_t sign = float_bits(x) >> 16 & 0x8000u;
  uint32_t bits = float_bits(x) & 0x7fffffffu;
  if (bits > 0x7f800000u) {
    bits = 0x7e00u;
  } else if (bits >= 0x477ff000u) {  // rounds past 65504
    bits = 0x7c00u;
  } else if (bits >= 0x38800000u) {
    bits = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
  } else {  // adding 0.5 lets the FPU round at 2^-24, where the mantissa of a half ends
    bits = float_bits(bits_float(bits) + 0.5f) - float_bits(0.5f);
  }
  return {static_cast<uint16_t>(bits | sign)};
}

// Calls f with a value of the element type of dtype.
template <class F>
void with_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kBFloat16:
      return f(BFloat16{});
    case DType::kFloat16:
      return f(Float16{});
  }
  throw std::invalid_argument("unknown dtype");
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace minivllm::cpu
