// Quantise a matrix and lay it out in the tiles of ktc/abi.h, and the inverse. Single-threaded.
#pragma once

#include <cstdint>
#include <string>

#include "ktc/abi.h"

namespace ktc {

// As in recipes and plans.
const char* format_name(int format);
const char* scale_name(int scale);

enum class SourceType { kFp32, kBf16, kFp16 };

// How a matrix is stored; `from_names` checks that the combination exists.
struct Scheme {
  ktc_format format = KTC_FP32;
  ktc_scale scale = KTC_SCALE_NONE;
  int64_t group = 0;  // 0 = the whole row

  // data_type "fp32" | "bf16" | "int8" | "int4"; scale "none" | "channel" | "group" | "integer" |
  // "codebook".
  // Throws std::invalid_argument for a combination that the layout does not have.
  static Scheme from_names(const std::string& data_type, const std::string& scale, int64_t group);

  int64_t groups(int64_t k_pad) const { return group > 0 ? (k_pad + group - 1) / group : 1; }
  int64_t step_k() const { return format == KTC_FP32 ? 16 : format == KTC_BF16 ? 32 : 64; }
  int64_t tiles_per_step() const { return format == KTC_INT4 ? 1 : 2; }
  int64_t steps(int64_t k_pad) const { return k_pad / step_k(); }
  int64_t block_bytes(int64_t k_pad) const { return steps(k_pad) * tiles_per_step() * 1024; }
  int64_t scale_count(int64_t n_pad, int64_t k_pad) const {
    return scale == KTC_SCALE_NONE ? 0 : scale == KTC_SCALE_GROUP ? n_pad * groups(k_pad) : n_pad;
  }
  // Whether `mult` holds something, and how many bytes of it one group of a 32-row block has.
  bool has_mult() const { return scale == KTC_SCALE_INTEGER || scale == KTC_SCALE_CODEBOOK; }
  int64_t group_mult_bytes() const { return scale == KTC_SCALE_CODEBOOK ? 16 : 32; }
  // Groups of activation sums: only KTC_SCALE_GROUP needs more than one.
  int64_t act_groups(int64_t k_pad) const { return scale == KTC_SCALE_GROUP ? groups(k_pad) : 1; }
  bool integer() const { return format == KTC_INT8 || format == KTC_INT4; }
};

struct PackSource {
  const void* data;
  SourceType type;
  const int64_t* rows;  // source row of each stored row, or -1 for a zero row
  int64_t n_pad;        // stored rows, a multiple of 32
  int64_t k;            // valid columns
  int64_t ld;           // elements between source rows
  int64_t col_stride;   // elements between source columns
};

constexpr int64_t round_up(int64_t v, int64_t multiple) { return (v + multiple - 1) / multiple * multiple; }

// Writes tiles, scale and mult (those that the scheme has). fp32 and bf16 keep NaN and infinity; the
// integer formats treat them as 0. Returns the flat index row * k + column (source rows) of the
// first one in stored order, or -1.
int64_t pack_matrix(const PackSource& source, const Scheme& scheme, uint8_t* tiles, float* scale,
                    uint8_t* mult);

// out [n_pad, k_pad], dequantised, in stored row order.
void unpack_matrix(const uint8_t* tiles, const float* scale, const uint8_t* mult, int64_t n_pad,
                   int64_t k_pad, const Scheme& scheme, float* out);

}  // namespace ktc
