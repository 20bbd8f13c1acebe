// What the quantisers of a row share: four-lane sums in a fixed order. See quantize.h.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "numerics.h"

namespace ktc {

constexpr float kTiny = 0x1p-100f;

inline float max_abs(const float* x, int64_t n) {
  const __m128 mask = _mm_castsi128_ps(_mm_set1_epi32(0x7fffffff));
  __m128 m = _mm_setzero_ps();
  int64_t i = 0;
  for (; i + 4 <= n; i += 4) m = _mm_max_ps(m, _mm_and_ps(_mm_loadu_ps(x + i), mask));
  alignas(16) float lanes[4];
  _mm_store_ps(lanes, m);
  float best = std::max(std::max(lanes[0], lanes[1]), std::max(lanes[2], lanes[3]));
  for (; i < n; ++i) best = std::max(best, std::fabs(x[i]));
  return best;
}

// sum x * q in four lanes (lane = index % 4), then (0 + 1) + (2 + 3); and sum q^2.
inline void fit_sums(const float* x, const int8_t* q, int64_t n, float* dot, int64_t* norm) {
  __m128 acc = _mm_setzero_ps();
  int32_t squares = 0;
  for (int64_t i = 0; i < n; i += 4) {
    const __m128 v = _mm_set_ps(q[i + 3], q[i + 2], q[i + 1], q[i]);
    acc = _mm_add_ps(acc, _mm_mul_ps(_mm_loadu_ps(x + i), v));
  }
  for (int64_t i = 0; i < n; ++i) squares += q[i] * q[i];
  alignas(16) float lanes[4];
  _mm_store_ps(lanes, acc);
  *dot = (lanes[0] + lanes[1]) + (lanes[2] + lanes[3]);
  *norm = squares;
}

inline int64_t group_width(int64_t k_pad, int64_t group) { return group > 0 ? group : k_pad; }

}  // namespace ktc
