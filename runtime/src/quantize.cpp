#include "quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "numerics.h"
#include "quantize_row.h"

namespace ktc {
namespace {

// int4, float scales: scale = signed amax / divisor, for each divisor. Below 8 the largest weights clip.
constexpr int kGroupCandidates = 12;
alignas(16) constexpr float kGroupDivisors[kGroupCandidates] = {5.5f, 6.0f, 6.4f, 6.8f, 7.2f,  7.6f,
                                                                8.0f, 8.4f, 8.9f, 9.5f, 10.2f, 11.0f};

// int4, integer scales: channel scale = row amax / (16 * divisor) for each divisor, and for each group
// eight multipliers from round(group amax / channel scale / 9.5) up.
constexpr int kChannelCandidates = 2;
constexpr float kChannelDivisors[kChannelCandidates] = {7.0f, 8.0f};
constexpr int kMultCandidates = 8;
constexpr int kMaxMult = 16;
constexpr float kFirstMult = 1.0f / 9.5f;

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

// Least squares: for each candidate the best multiple of its step is (sum t q) / (sum q^2) and lowers the
// squared error by (sum t q)^2 / (sum q^2) steps^2. Sums run over k in order, one lane per candidate.
float best_group_scale(const float* x, int64_t n, float signed_max) {
  constexpr int kVectors = kGroupCandidates / 4;
  const __m128 inverse_max = _mm_set1_ps(1.0f / signed_max);
  __m128 inv[kVectors], dot[kVectors], norm[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    inv[v] = _mm_mul_ps(_mm_load_ps(kGroupDivisors + 4 * v), inverse_max);
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
  alignas(16) float fits[kGroupCandidates], gains[kGroupCandidates];
  for (int v = 0; v < kVectors; ++v) {
    const __m128 fit = _mm_div_ps(dot[v], norm[v]);
    const __m128 d = _mm_load_ps(kGroupDivisors + 4 * v);
    _mm_store_ps(fits + 4 * v, fit);
    _mm_store_ps(gains + 4 * v, _mm_div_ps(_mm_mul_ps(dot[v], fit), _mm_mul_ps(d, d)));
  }
  int best = 0;
  for (int c = 1; c < kGroupCandidates; ++c) best = gains[c] > gains[best] ? c : best;
  return fits[best] * (signed_max / kGroupDivisors[best]);
}

// 1 / step and step^2 (in units of the first channel scale) of every multiplier under one channel scale.
struct StepTable {
  float channel;
  float inverse[kMaxMult], square[kMaxMult];

  StepTable(float scale, float unit) : channel(scale) {
    for (int m = 1; m <= kMaxMult; ++m) {
      const float step = scale * static_cast<float>(m);
      inverse[m - 1] = 1.0f / step;
      square[m - 1] = (step / unit) * (step / unit);
    }
  }
};

// The multiplier of least squared error for one group under each channel scale.
void best_multipliers(const float* x, int64_t n, float amax, const StepTable* tables, float* error,
                      uint8_t* mult) {
  constexpr int kVectors = kMultCandidates / 4;
  int first[kChannelCandidates];
  __m128 inv[kChannelCandidates][kVectors], acc[kChannelCandidates][kVectors];
  for (int c = 0; c < kChannelCandidates; ++c) {
    const float m = round_even(amax / tables[c].channel * kFirstMult);
    first[c] = static_cast<int>(clamp(m, 1.0f, static_cast<float>(kMaxMult - kMultCandidates + 1)));
    for (int v = 0; v < kVectors; ++v) {
      inv[c][v] = _mm_loadu_ps(tables[c].inverse + first[c] - 1 + 4 * v);
      acc[c][v] = _mm_setzero_ps();
    }
  }
  for (int64_t i = 0; i < n; ++i) {
    const __m128 xi = _mm_set1_ps(x[i]);
    for (int c = 0; c < kChannelCandidates; ++c) {
      for (int v = 0; v < kVectors; ++v) {
        const __m128 t = _mm_mul_ps(xi, inv[c][v]);
        const __m128 e = _mm_sub_ps(t, clamp(round_even(t), -8.0f, 7.0f));
        acc[c][v] = _mm_add_ps(acc[c][v], _mm_mul_ps(e, e));
      }
    }
  }
  for (int c = 0; c < kChannelCandidates; ++c) {
    alignas(16) float errors[kMultCandidates];
    for (int v = 0; v < kVectors; ++v)
      _mm_store_ps(errors + 4 * v,
                   _mm_mul_ps(acc[c][v], _mm_loadu_ps(tables[c].square + first[c] - 1 + 4 * v)));
    int best = 0;
    for (int j = 1; j < kMultCandidates; ++j) best = errors[j] < errors[best] ? j : best;
    error[c] = errors[best];
    mult[c] = static_cast<uint8_t>(first[c] + best);
  }
}

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

  const float unit = row_amax / (16.0f * kChannelDivisors[0]);
  const StepTable tables[kChannelCandidates] = {{unit, unit},
                                                {row_amax / (16.0f * kChannelDivisors[1]), unit}};
  float total[kChannelCandidates] = {};
  mult_.resize(groups * kChannelCandidates);
  for (int64_t g = 0; g < groups; ++g) {
    uint8_t* chosen = mult_.data() + g * kChannelCandidates;
    float error[kChannelCandidates] = {};
    if (amax_[g] < kTiny) {
      std::fill(chosen, chosen + kChannelCandidates, static_cast<uint8_t>(0));
    } else {
      best_multipliers(x + g * width, std::min(width, k_pad - g * width), amax_[g], tables, error, chosen);
    }
    for (int c = 0; c < kChannelCandidates; ++c) total[c] += error[c];
  }
  const int best = total[1] < total[0] ? 1 : 0;

  // Round with the chosen steps, then fit the channel scale to the integers by least squares.
  double dot = 0.0;
  int64_t norm = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t n = std::min(width, k_pad - g * width);
    const int64_t m = mult_[g * kChannelCandidates + best];
    mult[g] = static_cast<uint8_t>(m);
    round_clamp(x + g * width, n, m > 0 ? tables[best].inverse[m - 1] : 0.0f, -8.0f, 7.0f, q + g * width);
    float group_dot;
    int64_t group_norm;
    fit_sums(x + g * width, q + g * width, n, &group_dot, &group_norm);
    dot += static_cast<double>(group_dot) * static_cast<double>(m);
    norm += group_norm * m * m;
  }
  *scale = norm > 0 ? static_cast<float>(dot / static_cast<double>(norm)) : tables[best].channel;
}

}  // namespace ktc
