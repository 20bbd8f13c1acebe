#include "pack.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "ktc/codebook.h"
#include "numerics.h"
#include "quantize.h"

namespace ktc {
namespace {

constexpr int64_t kBlockRows = 32;
constexpr int64_t kTileWords = 256;  // a tile is 16 x 16 words of 4 bytes

template <SourceType T>
uint32_t load_bits(const void* data, int64_t index) {
  if constexpr (T == SourceType::kFp32) {
    uint32_t b;
    std::memcpy(&b, static_cast<const char*>(data) + index * 4, 4);
    return b;
  } else {
    uint16_t h;
    std::memcpy(&h, static_cast<const char*>(data) + index * 2, 2);
    return T == SourceType::kBf16 ? bf16_to_bits(h) : fp16_to_bits(h);
  }
}

// One block of 32 stored rows as fp32 bits [32][k_pad].
template <SourceType T>
void load_block(const PackSource& s, int64_t first_row, int64_t k_pad, uint32_t* out) {
  for (int64_t r = 0; r < kBlockRows; ++r) {
    const int64_t row = s.rows[first_row + r];
    uint32_t* dst = out + r * k_pad;
    const int64_t valid = row < 0 ? 0 : s.k;
    if (s.col_stride == 1) {
      for (int64_t c = 0; c < valid; ++c) dst[c] = load_bits<T>(s.data, row * s.ld + c);
    }
    std::fill(dst + valid, dst + k_pad, 0u);
  }
  if (s.col_stride == 1) return;
  for (int64_t c = 0; c < s.k; ++c) {  // a transposed source: neighbouring rows share cache lines
    for (int64_t r = 0; r < kBlockRows; ++r) {
      const int64_t row = s.rows[first_row + r];
      if (row >= 0) out[r * k_pad + c] = load_bits<T>(s.data, row * s.ld + c * s.col_stride);
    }
  }
}

void load_block(const PackSource& s, int64_t first_row, int64_t k_pad, uint32_t* out) {
  if (s.type == SourceType::kFp32) load_block<SourceType::kFp32>(s, first_row, k_pad, out);
  if (s.type == SourceType::kBf16) load_block<SourceType::kBf16>(s, first_row, k_pad, out);
  if (s.type == SourceType::kFp16) load_block<SourceType::kFp16>(s, first_row, k_pad, out);
}

bool any_nonfinite(const uint32_t* bits, int64_t n) {
  uint32_t seen = 0;
  for (int64_t i = 0; i < n; ++i) seen |= is_nonfinite(bits[i]) ? 1u : 0u;
  return seen != 0;
}

// words [16][ld] of one half block -> tiles; tile t holds words 16t.. of each row, transposed.
void store_tiles(const uint32_t* words, int64_t ld, int64_t tiles, int64_t tile_stride, uint32_t* out) {
  for (int64_t t = 0; t < tiles; ++t) {
    uint32_t* tile = out + t * tile_stride;
    for (int64_t c = 0; c < 16; ++c) {
      const uint32_t* row = words + c * ld + t * 16;
      for (int64_t r = 0; r < 16; ++r) tile[r * 16 + c] = row[r];
    }
  }
}

// Words of four k each from q [32][k_pad]; int4 joins row c (low nibble) with row c + 16 (high).
void integer_words(const int8_t* q, int64_t k_pad, bool int4, uint32_t* words) {
  const int64_t n = k_pad / 4;
  const int64_t rows = int4 ? 16 : 32;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t w = 0; w < n; ++w) {
      uint32_t low;
      std::memcpy(&low, q + r * k_pad + 4 * w, 4);
      if (int4) {
        uint32_t high;
        std::memcpy(&high, q + (r + 16) * k_pad + 4 * w, 4);
        // q + 8 in four bits is q ^ 8 of its low nibble.
        words[r * n + w] = ((low & 0x0f0f0f0fu) ^ 0x08080808u) | (((high & 0x0f0f0f0fu) ^ 0x08080808u) << 4);
      } else {
        words[r * n + w] = low ^ 0x80808080u;  // q + 128
      }
    }
  }
}

}  // namespace

const char* format_name(int format) {
  constexpr const char* names[] = {"fp32", "bf16", "int8", "int4"};
  return format >= 0 && format < 4 ? names[format] : "unknown";
}

constexpr int kScales = 5;

const char* scale_name(int scale) {
  constexpr const char* names[] = {"none", "channel", "group", "integer", "codebook"};
  return scale >= 0 && scale < kScales ? names[scale] : "unknown";
}

Scheme Scheme::from_names(const std::string& data_type, const std::string& scale, int64_t group) {
  int format = 0, mode = 0;
  while (format < 4 && data_type != format_name(format)) ++format;
  while (mode < kScales && scale != scale_name(mode)) ++mode;
  if (format == 4) throw std::invalid_argument("unknown data type '" + data_type + "'");
  if (mode == kScales) throw std::invalid_argument("unknown scale mode '" + scale + "'");
  Scheme s;
  s.format = static_cast<ktc_format>(format);
  s.scale = static_cast<ktc_scale>(mode);
  s.group = group;

  const bool grouped = s.scale == KTC_SCALE_GROUP || s.has_mult();
  const bool known = (!s.integer() && s.scale == KTC_SCALE_NONE) ||
                     (s.format == KTC_INT8 && (s.scale == KTC_SCALE_CHANNEL || s.scale == KTC_SCALE_GROUP)) ||
                     (s.format == KTC_INT4 && grouped);
  if (!known) throw std::invalid_argument("data type '" + data_type + "' has no scale mode '" + scale + "'");
  if (grouped ? (group <= 0 || group % 16 != 0) : group != 0)
    throw std::invalid_argument("group " + std::to_string(group) + " does not fit scale mode '" + scale +
                                "': group, integer and codebook scales need a multiple of 16, others 0");
  if (s.scale == KTC_SCALE_CODEBOOK && group > 128)
    throw std::invalid_argument("group " + std::to_string(group) +
                                ": codebook groups have at most 128 columns");
  return s;
}

int64_t pack_matrix(const PackSource& source, const Scheme& scheme, uint8_t* tiles, float* scale,
                    uint8_t* mult) {
  if (source.n_pad % kBlockRows != 0) throw std::invalid_argument("stored rows are not a multiple of 32");
  const StrictFloat strict;
  const int64_t k_pad = round_up(source.k, 64);
  const int64_t groups = scheme.groups(k_pad);
  const int64_t block_bytes = scheme.block_bytes(k_pad);
  int64_t first_bad = -1;

  std::vector<uint32_t> bits(kBlockRows * k_pad);
  std::vector<int8_t> q(scheme.integer() ? kBlockRows * k_pad : 0);
  std::vector<uint32_t> words(scheme.format == KTC_FP32 ? 0 : kBlockRows * k_pad / 2);
  std::vector<float> x(scheme.integer() ? k_pad : 0), row_scale(groups);
  std::vector<uint8_t> row_mult(groups);
  IntegerScaleQuantizer integer_scale;
  CodebookQuantizer codebook;

  for (int64_t first = 0; first < source.n_pad; first += kBlockRows) {
    load_block(source, first, k_pad, bits.data());
    if (any_nonfinite(bits.data(), kBlockRows * k_pad)) {
      for (int64_t i = 0; i < kBlockRows * k_pad; ++i) {
        if (!is_nonfinite(bits[i])) continue;
        if (first_bad < 0) first_bad = source.rows[first + i / k_pad] * source.k + i % k_pad;
        if (scheme.integer()) bits[i] = 0;
      }
    }
    uint32_t* out = reinterpret_cast<uint32_t*>(tiles + first / kBlockRows * block_bytes);
    const int64_t steps = scheme.steps(k_pad);
    if (scheme.format == KTC_FP32) {
      for (int h = 0; h < 2; ++h)
        store_tiles(bits.data() + h * 16 * k_pad, k_pad, steps, 2 * kTileWords, out + h * kTileWords);
      continue;
    }
    if (scheme.format == KTC_BF16) {
      for (int64_t i = 0; i < kBlockRows * k_pad / 2; ++i) {
        words[i] = bits_to_bf16(bits[2 * i]) | static_cast<uint32_t>(bits_to_bf16(bits[2 * i + 1])) << 16;
      }
      for (int h = 0; h < 2; ++h)
        store_tiles(words.data() + h * 8 * k_pad, k_pad / 2, steps, 2 * kTileWords, out + h * kTileWords);
      continue;
    }
    for (int64_t r = 0; r < kBlockRows; ++r) {
      std::memcpy(x.data(), bits.data() + r * k_pad, k_pad * sizeof(float));
      int8_t* q_row = q.data() + r * k_pad;
      if (scheme.format == KTC_INT8)
        quantize_int8(x.data(), k_pad, scheme.group, q_row, row_scale.data());
      else if (scheme.scale == KTC_SCALE_GROUP)
        quantize_int4_group(x.data(), k_pad, scheme.group, q_row, row_scale.data());
      else if (scheme.scale == KTC_SCALE_CODEBOOK)
        codebook(x.data(), k_pad, scheme.group, q_row, row_scale.data(), row_mult.data());
      else
        integer_scale(x.data(), k_pad, scheme.group, q_row, row_scale.data(), row_mult.data());
      // Grouped arrays are [block][group][32].
      if (scheme.scale == KTC_SCALE_GROUP) {
        for (int64_t g = 0; g < groups; ++g) scale[first * groups + g * kBlockRows + r] = row_scale[g];
      } else {
        scale[first + r] = row_scale[0];
      }
      if (scheme.scale == KTC_SCALE_INTEGER) {
        for (int64_t g = 0; g < groups; ++g) mult[first * groups + g * kBlockRows + r] = row_mult[g];
      }
      if (scheme.scale == KTC_SCALE_CODEBOOK) {  // [block][group][16], rows r and r + 16 in a byte
        uint8_t* at = mult + first / 2 * groups + r % 16;
        for (int64_t g = 0; g < groups; ++g)
          at[g * 16] = r < 16 ? row_mult[g] : static_cast<uint8_t>(at[g * 16] | row_mult[g] << 4);
      }
    }
    const bool int4 = scheme.format == KTC_INT4;
    integer_words(q.data(), k_pad, int4, words.data());
    if (int4) {
      store_tiles(words.data(), k_pad / 4, steps, kTileWords, out);
    } else {
      for (int h = 0; h < 2; ++h)
        store_tiles(words.data() + h * 4 * k_pad, k_pad / 4, steps, 2 * kTileWords, out + h * kTileWords);
    }
  }
  return first_bad;
}

void unpack_matrix(const uint8_t* tiles, const float* scale, const uint8_t* mult, int64_t n_pad,
                   int64_t k_pad, const Scheme& scheme, float* out) {
  if (n_pad % kBlockRows != 0 || k_pad % 64 != 0) throw std::invalid_argument("n_pad or k_pad is not padded");
  const StrictFloat strict;
  const int64_t groups = scheme.groups(k_pad);
  const int64_t per_word = scheme.step_k() / 16;  // k in each 4-byte word
  for (int64_t n = 0; n < n_pad; ++n) {
    const int64_t block = n / kBlockRows, in_block = n % kBlockRows, c = n % 16;
    const int64_t half = scheme.format == KTC_INT4 ? 0 : in_block / 16;
    const uint8_t* base = tiles + block * scheme.block_bytes(k_pad) + half * 1024;
    for (int64_t k = 0; k < k_pad; ++k) {
      const uint8_t* tile = base + k / scheme.step_k() * scheme.tiles_per_step() * 1024;
      const int64_t r = k % scheme.step_k() / per_word, j = k % per_word;
      const uint8_t* word = tile + (r * 16 + c) * 4;
      float w = 0.0f;
      if (scheme.format == KTC_FP32) {
        std::memcpy(&w, word, 4);
      } else if (scheme.format == KTC_BF16) {
        uint16_t h;
        std::memcpy(&h, word + 2 * j, 2);
        w = bits_float(bf16_to_bits(h));
      } else {
        int q = word[j];
        if (scheme.format == KTC_INT8)
          q -= 128;
        else
          q = (in_block < 16 ? (q & 15) : (q >> 4)) - 8;
        const int64_t g = scheme.group > 0 ? k / scheme.group : 0;
        const int64_t at = block * groups * kBlockRows + g * kBlockRows + in_block;
        if (scheme.scale == KTC_SCALE_INTEGER) q *= mult[at];
        if (scheme.scale == KTC_SCALE_CODEBOOK) {
          const int both = mult[(block * groups + g) * 16 + in_block % 16];
          q = codebook_level(in_block < 16 ? both & 15 : both >> 4, q + 8);
        }
        w = scale[scheme.scale == KTC_SCALE_GROUP ? at : n] * static_cast<float>(q);
      }
      out[n * k_pad + k] = w;
    }
  }
}

}  // namespace ktc
