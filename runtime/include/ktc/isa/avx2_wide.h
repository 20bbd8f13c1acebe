/* int4 for the kernels of gemm_wide.h on AVX2: nibbles of a group straight to signed 16-bit weights. Included
 * by avx2.h.
 */
#ifndef KTC_ISA_AVX2_WIDE_H
#define KTC_ISA_AVX2_WIDE_H

#include "ktc/isa/avx2.h"

namespace ktc {
namespace isa {

/* Integer scales: multiplier * (nibble - 8). */
template <>
struct Avx2::WideScale<false> {
  I mult, offset; /* of each lane's row, in both 16-bit halves: the multiplier and 8 times it */
  static KTC_INLINE void load(const uint8_t* p, WideScale* halves) {
    for (int h = 0; h < 2; ++h) {
      halves[h].mult = load_mult(p + 16 * h).mult;
      for (int i = 0; i < 2; ++i) halves[h].offset.v[i] = _mm256_slli_epi16(halves[h].mult.v[i], 3);
    }
  }
  KTC_INLINE W words(B nib) const {
    W w = Avx2::words(nib);
    for (int i = 0; i < 2; ++i) {
      w.even.v[i] = _mm256_sub_epi16(_mm256_mullo_epi16(w.even.v[i], mult.v[i]), offset.v[i]);
      w.odd.v[i] = _mm256_sub_epi16(_mm256_mullo_epi16(w.odd.v[i], mult.v[i]), offset.v[i]);
    }
    return w;
  }
};

/* Whether (entry * (256 * multiplier) + 2^14) >> 15, with -256 * multiplier - 1 for the negated sets, is the
 * level of every selector and nibble. */
constexpr bool wide_levels_are_exact() {
  for (int s = 0; s < 16; ++s) {
    const int mult = s & 8 ? -256 * kCodebookMult[s & 7] - 1 : 256 * kCodebookMult[s];
    for (int c = 0; c < 16; ++c) {
      if ((kCodebook[c] * mult + (1 << 14)) >> 15 != codebook_level(s, c)) return false;
    }
  }
  return true;
}

/* The codebook: a level is the rounded upper half of entry * (256 * multiplier), which vpmulhrsw gives, and
 * the sign goes into the multiplier. Rounding is away from zero on one side only: where entry * multiplier
 * lies half way between two levels (48 * 100 does) a negative multiplier is made larger by 1 in 2^15, which
 * moves no other product. */
template <>
struct Avx2::WideScale<true> {
  I mult;
  static KTC_INLINE void load(const uint8_t* p, WideScale* halves) {
    constexpr const uint8_t (&m)[8] = kCodebookMult;
    static_assert(wide_levels_are_exact(), "negated multipliers give the codebook's levels");
    const __m256i magnitude = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(char(m[0]), char(m[1]), char(m[2]), char(m[3]), char(m[4]), char(m[5]), char(m[6]),
                      char(m[7]), char(-m[0] - 1), char(-m[1] - 1), char(-m[2] - 1), char(-m[3] - 1),
                      char(-m[4] - 1), char(-m[5] - 1), char(-m[6] - 1), char(-m[7] - 1)));
    /* The low byte of a multiplier is 0 above zero and 255 below: (-m - 1) * 256 + 255 = -256 * m - 1. */
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3,  //
                                            4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
    const __m256i low = _mm256_set1_epi8(15);
    for (int i = 0; i < 2; ++i) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i));
      const __m256i both = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), spread);
      for (int h = 0; h < 2; ++h) {
        const __m256i s = _mm256_and_si256(h ? _mm256_srli_epi16(both, 4) : both, low);
        const __m256i t = _mm256_shuffle_epi8(magnitude, s);
        /* High byte t, low byte its sign: the two bytes of a 16-bit half are the same here. */
        halves[h].mult.v[i] = _mm256_blendv_epi8(_mm256_and_si256(t, _mm256_set1_epi16(int16_t(0xff00))),
                                                 _mm256_or_si256(t, _mm256_set1_epi16(0x00ff)), t);
      }
    }
  }
  KTC_INLINE W words(B nib) const {
    const __m256i book =
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kCodebook)));
    W w;
    for (int i = 0; i < 2; ++i) {
      const __m256i c = _mm256_shuffle_epi8(book, nib.v[i]);
      w.even.v[i] = _mm256_mulhrs_epi16(_mm256_srai_epi16(_mm256_slli_epi16(c, 8), 8), mult.v[i]);
      w.odd.v[i] = _mm256_mulhrs_epi16(_mm256_srai_epi16(c, 8), mult.v[i]);
    }
    return w;
  }
};

}  // namespace isa
}  // namespace ktc
#endif  // KTC_ISA_AVX2_WIDE_H
