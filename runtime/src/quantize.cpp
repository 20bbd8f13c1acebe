#include "quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numerics.h"

namespace ktc {
namespace {

constexpr float kTiny = 0x1p-100f;

// Candidate divisors: scale = amax / divisor. Below 8 the largest weights are clipped.
constexpr int kGroupCandidates = 16;
alignas(16) constexpr float kGroupDivisors[kGroupCandidates] = {5.0f, 5.5f, 5.9f, 6.2f, 6.5f, 6.8f, 7.1f, 7.4f,
                                                                7.7f, 8.0f, 8.3f, 8.7f, 9.2f, 9.8f, 10.6f, 11.5f};

// Integer scales: channel scale = row amax / (16 * divisor), then multiplier ~ group amax / (scale * divisor).
constexpr int kChannelCandidates = 3;
constexpr float kChannelDivisors[kChannelCandidates] = {6.5f, 7.25f, 8.0f};
constexpr int kMultCandidates = 8;
constexpr float kMultDivisors[kMultCandidates] = {5.2f, 5.8f, 6.3f, 6.8f, 7.3f, 7.8f, 8.5f, 9.5f};
constexpr int kLanes = kChannelCandidates * kMultCandidates;
static_assert(kLanes % 4 == 0, "candidates fill whole vectors");

float max_abs(const float* x, int64_t n) {
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

// q = clamp(round(x * inverse), low, high); n is a multiple of 4.
void round_clamp(const float* x, int64_t n, float inverse, float low, float high, int8_t* q) {
  const __m128 inv = _mm_set1_ps(inverse);
  for (int64_t i = 0; i < n; i += 4) {
    const __m128 v = clamp(round_even(_mm_mul_ps(_mm_loadu_ps(x + i), inv)), low, high);
    __m128i w = _mm_cvtps_epi32(v);  // exact: v is an integer
    w = _mm_packs_epi16(_mm_packs_epi32(w, w), w);
    const int32_t four = _mm_cvtsi128_si32(w);
    std::memcpy(q + i, &four, 4);
  }
}

// For every candidate scale: least-squares gain (sum x q)^2 / (sum q^2) in units of that candidate.
float best_group_scale(const float* x, int64_t n, float signed_max) {
  constexpr int kVectors = kGroupCandidates / 4;
  __m128 inv[kVectors], dot[kVectors], norm[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    inv[v] = _mm_div_ps(_mm_load_ps(kGroupDivisors + 4 * v), _mm_set1_ps(signed_max));
    dot[v] = norm[v] = _mm_setzero_ps();
  }
  for (int64_t i = 0; i < n; ++i) {
    const __m128 xi = _mm_set1_ps(x[i]);
    for (int v = 0; v < kVectors; ++v) {
      const __m128 t = _mm_mul_ps(xi, inv[v]);
      const __m128 q = clamp(round_even(t), -8.0f, 7.0f);
      dot[v] = _mm_add_ps(dot[v], _mm_mul_ps(t, q));
      norm[v] = _mm_add_ps(norm[v], _mm_mul_ps(q, q));
    }
  }
  alignas(16) float dots[kGroupCandidates], norms[kGroupCandidates];
  for (int v = 0; v < kVectors; ++v) {
    _mm_store_ps(dots + 4 * v, dot[v]);
    _mm_store_ps(norms + 4 * v, norm[v]);
  }
  int best = 0;
  float best_gain = -1.0f;
  for (int c = 0; c < kGroupCandidates; ++c) {
    const float d = dots[c] / kGroupDivisors[c];
    const float gain = (d * d) / norms[c];  // in units of signed_max^2
    if (gain > best_gain) best_gain = gain, best = c;
  }
  return (dots[best] / norms[best]) * (signed_max / kGroupDivisors[best]);
}

// Squared error, in x's units, of every (channel scale, multiplier) candidate of one group; picks the
// best multiplier for each channel scale.
void best_multipliers(const float* x, int64_t n, float amax, const float* scales, float* error, uint8_t* mult) {
  constexpr int kVectors = kLanes / 4;
  alignas(16) float mults[kLanes], steps[kLanes], errors[kLanes];
  for (int c = 0; c < kChannelCandidates; ++c) {
    const float ratio = amax / scales[c];
    for (int j = 0; j < kMultCandidates; ++j) {
      const float m = clamp(round_even(ratio / kMultDivisors[j]), 1.0f, 16.0f);
      mults[c * kMultCandidates + j] = m;
      steps[c * kMultCandidates + j] = scales[c] * m;
    }
  }
  __m128 inv[kVectors], acc[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    inv[v] = _mm_div_ps(_mm_set1_ps(1.0f), _mm_load_ps(steps + 4 * v));
    acc[v] = _mm_setzero_ps();
  }
  for (int64_t i = 0; i < n; ++i) {
    const __m128 xi = _mm_set1_ps(x[i]);
    for (int v = 0; v < kVectors; ++v) {
      const __m128 t = _mm_mul_ps(xi, inv[v]);
      const __m128 e = _mm_sub_ps(t, clamp(round_even(t), -8.0f, 7.0f));
      acc[v] = _mm_add_ps(acc[v], _mm_mul_ps(e, e));
    }
  }
  for (int v = 0; v < kVectors; ++v) _mm_store_ps(errors + 4 * v, acc[v]);
  for (int c = 0; c < kChannelCandidates; ++c) {
    float best = 0.0f;
    for (int j = 0; j < kMultCandidates; ++j) {
      const int lane = c * kMultCandidates + j;
      const float relative = steps[lane] / scales[0];  // keeps tiny and huge weights within range
      const float e = errors[lane] * (relative * relative);
      if (j == 0 || e < best) best = e, error[c] = e, mult[c] = static_cast<uint8_t>(mults[lane]);
    }
  }
}

int64_t group_width(int64_t k_pad, int64_t group) { return group > 0 ? group : k_pad; }

}  // namespace

void quantize_int8(const float* x, int64_t k_pad, int64_t group, int8_t* q, float* scale) {
  const int64_t width = group_width(k_pad, group);
  for (int64_t begin = 0, g = 0; begin < k_pad; begin += width, ++g) {
    const int64_t n = std::min(width, k_pad - begin);
    const float amax = max_abs(x + begin, n);
    const bool zero = amax < kTiny;
    scale[g] = zero ? 0.0f : amax / 127.0f;
    round_clamp(x + begin, n, zero ? 0.0f : 127.0f / amax, -127.0f, 127.0f, q + begin);
  }
}

void quantize_int4_group(const float* x, int64_t k_pad, int64_t group, int8_t* q, float* scale) {
  const int64_t width = group_width(k_pad, group);
  for (int64_t begin = 0, g = 0; begin < k_pad; begin += width, ++g) {
    const float* values = x + begin;
    const int64_t n = std::min(width, k_pad - begin);
    const float amax = max_abs(values, n);
    if (amax < kTiny) {
      scale[g] = 0.0f;
      std::fill(q + begin, q + begin + n, static_cast<int8_t>(0));
      continue;
    }
    int64_t at = 0;
    while (std::fabs(values[at]) != amax) ++at;
    scale[g] = best_group_scale(values, n, -values[at]);
    round_clamp(values, n, 1.0f / scale[g], -8.0f, 7.0f, q + begin);
  }
}

void IntegerScaleQuantizer::operator()(const float* x, int64_t k_pad, int64_t group, int8_t* q, float* scale,
                                       uint8_t* mult) {
  const int64_t width = group_width(k_pad, group);
  const int64_t groups = (k_pad + width - 1) / width;
  amax_.resize(groups);
  float row_amax = 0.0f;
  for (int64_t g = 0; g < groups; ++g) {
    amax_[g] = max_abs(x + g * width, std::min(width, k_pad - g * width));
    row_amax = std::max(row_amax, amax_[g]);
  }
  if (row_amax < kTiny) {
    *scale = 0.0f;
    std::fill(mult, mult + groups, static_cast<uint8_t>(0));
    std::fill(q, q + k_pad, static_cast<int8_t>(0));
    return;
  }

  float scales[kChannelCandidates], total[kChannelCandidates] = {};
  for (int c = 0; c < kChannelCandidates; ++c) scales[c] = row_amax / (16.0f * kChannelDivisors[c]);
  mult_.resize(groups * kChannelCandidates);
  for (int64_t g = 0; g < groups; ++g) {
    uint8_t* chosen = mult_.data() + g * kChannelCandidates;
    float error[kChannelCandidates] = {};
    if (amax_[g] < kTiny) {
      std::fill(chosen, chosen + kChannelCandidates, static_cast<uint8_t>(0));
    } else {
      best_multipliers(x + g * width, std::min(width, k_pad - g * width), amax_[g], scales, error, chosen);
    }
    for (int c = 0; c < kChannelCandidates; ++c) total[c] += error[c];
  }
  const int best = static_cast<int>(std::min_element(total, total + kChannelCandidates) - total);

  // Round with the chosen steps, then fit the channel scale to the integers by least squares.
  double dot = 0.0, norm = 0.0;
  for (int64_t g = 0; g < groups; ++g) {
    const float* values = x + g * width;
    int8_t* out = q + g * width;
    const int64_t n = std::min(width, k_pad - g * width);
    const uint8_t m = mult_[g * kChannelCandidates + best];
    mult[g] = m;
    round_clamp(values, n, m ? 1.0f / (scales[best] * m) : 0.0f, -8.0f, 7.0f, out);
    double group_dot = 0.0;
    int64_t group_norm = 0;
    for (int64_t i = 0; i < n; ++i) {
      group_dot += static_cast<double>(values[i]) * out[i];
      group_norm += out[i] * out[i];
    }
    dot += group_dot * m;
    norm += static_cast<double>(group_norm * m * m);
  }
  *scale = norm > 0.0 ? static_cast<float>(dot / norm) : scales[best];
}

}  // namespace ktc
