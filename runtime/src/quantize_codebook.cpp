// int4 through the codebook of ktc/codebook.h; ktc/quant/int4_codebook.py is the same, naively.
//
// Weights are rounded to quarters of a level first. From there on everything is exact integer arithmetic on
// two tables, indexed by position and selector: the squared distance to the nearest level, and its nibble.
#include <immintrin.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "cpu.h"
#include "ktc/codebook.h"
#include "quantize.h"
#include "quantize_row.h"

namespace ktc {
namespace {

constexpr int kSelectors = 16;
constexpr int kSteps = 4;             // positions per level
constexpr int kLimit = 160 * kSteps;  // positions are in [-kLimit, kLimit]
constexpr int kPositions = 2 * kLimit + 1;
constexpr int kCandidates = 4;
// Channel scale = largest weight of the row / divisor.
constexpr float kDivisors[kCandidates] = {126.0f, 132.0f, 137.0f, 146.0f};

constexpr int kSets =
    kSelectors / 2;  // the other half is negated: its errors at x are those of the first at -x

struct Tables {
  // 16 times the squared distance in positions; 128 of the largest fit an int32.
  alignas(64) int32_t error16[kPositions][kSets];
  uint8_t code[kPositions][kSelectors];

  Tables() {
    for (int at = 0; at < kPositions; ++at) {
      for (int s = 0; s < kSets; ++s) {
        int best = 0, distance = 1 << 20;
        for (int c = 0; c < 16; ++c) {  // of equal distances the lower nibble
          const int d = std::abs(at - kLimit - kSteps * codebook_level(s, c));
          if (d < distance) distance = d, best = c;
        }
        error16[at][s] = 16 * distance * distance;
        code[at][s] = code[kPositions - 1 - at][s + kSets] = static_cast<uint8_t>(best);
      }
    }
  }
};

const Tables& tables() {
  static const std::unique_ptr<const Tables> all = std::make_unique<Tables>();
  return *all;
}

// position[i] = clamp(round(x[i] * inverse)) + kLimit; n is a multiple of 4.
void positions(const float* x, int64_t n, float inverse, int32_t* position) {
  const __m128 inv = _mm_set1_ps(inverse);
  const __m128i shift = _mm_set1_epi32(kLimit);
  for (int64_t i = 0; i < n; i += 4) {
    const __m128 v = clamp(round_even(_mm_mul_ps(_mm_loadu_ps(x + i), inv)), -kLimit, kLimit);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(position + i), _mm_add_epi32(_mm_cvtps_epi32(v), shift));
  }
}

__m128i min_of(__m128i a, __m128i b) {
  const __m128i a_above = _mm_cmpgt_epi32(a, b);
  return _mm_or_si128(_mm_and_si128(a_above, b), _mm_andnot_si128(a_above, a));
}

// For each group of a row the selector of least squared error (the first of equals); returns the sum of these
// errors, in steps^2. Errors times 16 plus the selector: the least is also the first of equals.
int64_t select_sse2(const Tables& t, const int32_t* position, int64_t k, int64_t group, uint8_t* selector) {
  int64_t total = 0;
  for (int64_t begin = 0; begin < k; begin += group) {
    const int64_t end = std::min(begin + group, k);
    __m128i acc[4] = {_mm_set_epi32(3, 2, 1, 0), _mm_set_epi32(7, 6, 5, 4), _mm_set_epi32(11, 10, 9, 8),
                      _mm_set_epi32(15, 14, 13, 12)};
    for (int64_t i = begin; i < end; ++i) {
      const auto* row = reinterpret_cast<const __m128i*>(t.error16[position[i]]);
      const auto* negated = reinterpret_cast<const __m128i*>(t.error16[kPositions - 1 - position[i]]);
      for (int v = 0; v < 2; ++v) {
        acc[v] = _mm_add_epi32(acc[v], _mm_load_si128(row + v));
        acc[2 + v] = _mm_add_epi32(acc[2 + v], _mm_load_si128(negated + v));
      }
    }
    __m128i least = min_of(min_of(acc[0], acc[1]), min_of(acc[2], acc[3]));
    least = min_of(least, _mm_shuffle_epi32(least, 0x4e));
    least = min_of(least, _mm_shuffle_epi32(least, 0xb1));
    const int32_t key = _mm_cvtsi128_si32(least);
    *selector++ = static_cast<uint8_t>(key & 15);
    total += key >> 4;
  }
  return total;
}

// The same integers, eight at a time.
__attribute__((target("avx2"))) int64_t select_avx2(const Tables& t, const int32_t* position, int64_t k,
                                                    int64_t group, uint8_t* selector) {
  int64_t total = 0;
  for (int64_t begin = 0; begin < k; begin += group) {
    const int64_t end = std::min(begin + group, k);
    __m256i acc = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i negated = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
    for (int64_t i = begin; i < end; ++i) {
      const int32_t at = position[i];
      acc = _mm256_add_epi32(acc, _mm256_load_si256(reinterpret_cast<const __m256i*>(t.error16[at])));
      negated = _mm256_add_epi32(
          negated, _mm256_load_si256(reinterpret_cast<const __m256i*>(t.error16[kPositions - 1 - at])));
    }
    acc = _mm256_min_epi32(acc, negated);
    __m128i least = _mm_min_epi32(_mm256_castsi256_si128(acc), _mm256_extracti128_si256(acc, 1));
    least = _mm_min_epi32(least, _mm_shuffle_epi32(least, 0x4e));
    least = _mm_min_epi32(least, _mm_shuffle_epi32(least, 0xb1));
    const int32_t key = _mm_cvtsi128_si32(least);
    *selector++ = static_cast<uint8_t>(key & 15);
    total += key >> 4;
  }
  return total;
}

using Select = int64_t (*)(const Tables&, const int32_t*, int64_t, int64_t, uint8_t*);

// KTC_QUANTIZE_ISA=sse2 is for comparing the two.
Select best_select() {
  static const Select chosen = [] {
    const char* forced = std::getenv("KTC_QUANTIZE_ISA");
    const bool plain = forced != nullptr && std::strcmp(forced, "sse2") == 0;
    const std::vector<std::string> features = cpu_features();
    const bool avx2 = std::find(features.begin(), features.end(), "avx2") != features.end();
    return avx2 && !plain ? &select_avx2 : &select_sse2;
  }();
  return chosen;
}

}  // namespace

void CodebookQuantizer::operator()(const float* x, int64_t k_pad, int64_t group, int8_t* q, float* scale,
                                   uint8_t* selector) {
  const int64_t groups = (k_pad + group - 1) / group;
  const float row_amax = max_abs(x, k_pad);
  if (row_amax < kTiny) {
    *scale = 0.0f;
    std::fill(selector, selector + groups, static_cast<uint8_t>(0));
    std::fill(q, q + k_pad, static_cast<int8_t>(0));
    return;
  }
  const Tables& t = tables();
  const Select select = best_select();
  position_.resize(kCandidates * k_pad);
  chosen_.resize(kCandidates * groups);
  int best = 0;
  double least = 0.0;
  for (int c = 0; c < kCandidates; ++c) {
    int32_t* position = position_.data() + c * k_pad;
    positions(x, k_pad, static_cast<float>(kSteps) / (row_amax / kDivisors[c]), position);
    const int64_t total = select(t, position, k_pad, group, chosen_.data() + c * groups);
    const double relative = static_cast<double>(kDivisors[0]) / static_cast<double>(kDivisors[c]);
    const double error = static_cast<double>(total) * (relative * relative);
    if (c == 0 || error < least) least = error, best = c;
  }

  // The nibbles under the chosen selectors, then the channel scale by least squares: of weights in steps,
  // which cannot overflow.
  const float inverse = static_cast<float>(kSteps) / (row_amax / kDivisors[best]);
  steps_.resize(k_pad);
  for (int64_t i = 0; i < k_pad; ++i) steps_[i] = x[i] * inverse;
  level_.resize(k_pad);
  double dot = 0.0;
  int64_t norm = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * group, n = std::min(group, k_pad - begin);
    const uint8_t s = selector[g] = chosen_[best * groups + g];
    const int32_t* position = position_.data() + best * k_pad + begin;
    for (int64_t i = 0; i < n; ++i) {
      const uint8_t code = t.code[position[i]][s];
      q[begin + i] = static_cast<int8_t>(code - kCodebookZero);
      level_[begin + i] = static_cast<int8_t>(codebook_level(s, code));
    }
    float group_dot;
    int64_t group_norm;
    fit_sums(steps_.data() + begin, level_.data() + begin, n, &group_dot, &group_norm);
    dot += static_cast<double>(group_dot);
    norm += group_norm;
  }
  *scale = static_cast<float>(dot / static_cast<double>(norm) / static_cast<double>(inverse));
}

}  // namespace ktc
