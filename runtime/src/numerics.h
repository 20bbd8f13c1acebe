// Element conversions and four-lane arithmetic that give the same bits on every x86-64 host.
//
// Everything here is IEEE single precision with one rounding per operation: no contraction, no
// libm, no ISA beyond SSE2. It is not a maths library: only what quantising and packing need.
#pragma once

#include <emmintrin.h>

#include <cstdint>
#include <cstring>

namespace ktc {

// Round to nearest even with gradual underflow while in scope, whatever the caller had set
// (torch.set_flush_denormal changes MXCSR).
class StrictFloat {
 public:
  StrictFloat() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
  ~StrictFloat() { _mm_setcsr(saved_); }
  StrictFloat(const StrictFloat&) = delete;
  StrictFloat& operator=(const StrictFloat&) = delete;

 private:
  unsigned saved_;
};

inline uint32_t float_bits(float v) {
  uint32_t b;
  std::memcpy(&b, &v, sizeof b);
  return b;
}

inline float bits_float(uint32_t b) {
  float v;
  std::memcpy(&v, &b, sizeof v);
  return v;
}

inline bool is_nonfinite(uint32_t f32_bits) { return (f32_bits & 0x7f800000u) == 0x7f800000u; }

inline uint32_t bf16_to_bits(uint16_t v) { return static_cast<uint32_t>(v) << 16; }

// bf16 by round to nearest even; a NaN stays a (quiet) NaN.
inline uint16_t bits_to_bf16(uint32_t b) {
  const uint32_t rounded = (b + 0x7fffu + ((b >> 16) & 1u)) >> 16;
  const uint32_t nan = (b >> 16) | 0x40u;
  return static_cast<uint16_t>((b & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
}

// Exact; subnormal halves become normal floats, so the result does not depend on DAZ either.
inline uint32_t fp16_to_bits(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = h & 0x7fffu;
  const uint32_t small = float_bits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  const uint32_t normal = (magnitude << 13) + (112u << 23);
  const uint32_t special = (magnitude << 13) + (224u << 23);
  return sign | (magnitude < 0x400u ? small : magnitude < 0x7c00u ? normal : special);
}

// Nearest integer, ties to even, for |v| < 2^22.
constexpr float kRoundMagic = 12582912.0f;  // 1.5 * 2^23
inline float round_even(float v) { return (v + kRoundMagic) - kRoundMagic; }
inline __m128 round_even(__m128 v) {
  const __m128 magic = _mm_set1_ps(kRoundMagic);
  return _mm_sub_ps(_mm_add_ps(v, magic), magic);
}
inline __m128 clamp(__m128 v, float low, float high) {
  return _mm_max_ps(_mm_min_ps(v, _mm_set1_ps(high)), _mm_set1_ps(low));
}
inline float clamp(float v, float low, float high) { return v < low ? low : (v > high ? high : v); }

}  // namespace ktc
