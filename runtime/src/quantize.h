// Quantisers of one weight row: f32 in, small integers and scales out. Pure functions.
//
// The same algorithms, naively written, are in ktc/quant/*.py and give the same bytes; the order of
// every floating-point operation below is therefore part of the format (see docs/bundle-format.md).
// x has k_pad values (padding is 0, no NaN or infinity); `group` = 0 means the whole row, and the
// last group may be partial. A group (channel scales: a row) whose largest magnitude is below 2^-100
// becomes exact zeros with scale 0.
#pragma once

#include <cstdint>
#include <vector>

namespace ktc {

// scale[groups]; q in [-127, 127]: w = scale[g] * q.
void quantize_int8(const float* x, int64_t k_pad, int64_t group, int8_t* q, float* scale);

// scale[groups], possibly negative (so that the largest weight may sit at -8); q in [-8, 7].
void quantize_int4_group(const float* x, int64_t k_pad, int64_t group, int8_t* q, float* scale);

// One f32 scale per row and one multiplier in 1..16 (0: the group is all zeros) per group:
// w = scale * mult[g] * q, q in [-8, 7].
class IntegerScaleQuantizer {
 public:
  void operator()(const float* x, int64_t k_pad, int64_t group, int8_t* q, float* scale, uint8_t* mult);

 private:
  std::vector<float> amax_;
  std::vector<uint8_t> mult_;
};

// One f32 scale per row and one selector (0..15) per group: w = scale * level(selector[g], q + 8) of
// ktc/codebook.h, q in [-8, 7]. A row of zeros has scale 0, selectors 0 and q 0.
class CodebookQuantizer {
 public:
  void operator()(const float* x, int64_t k_pad, int64_t group, int8_t* q, float* scale, uint8_t* selector);

 private:
  std::vector<int32_t> position_;
  std::vector<uint8_t> chosen_;
  std::vector<int8_t> level_;
  std::vector<float> steps_;
};

}  // namespace ktc
