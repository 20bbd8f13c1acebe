/* Primitives of AVX-512 (F, BW, VL, DQ, VNNI). Meanings as in isa/scalar.h. */
#ifndef KTC_ISA_AVX512_H
#define KTC_ISA_AVX512_H

#include <immintrin.h>

#include "ktc/kernels/common.h"

namespace ktc {
namespace isa {

struct Avx512 {
  using F = __m512;
  using I = __m512i;
  using B = __m512i;

  static constexpr int kIntRows = 8, kMostIntRows = 12;
  static constexpr int kFloatRows = 4;
  static constexpr bool kWideInt = false, kWideFloat = true; /* kernels of gemm_wide.h */
  static constexpr bool kDotFloat = false, kPagesByTurns = true;
  static constexpr int kWideFloatRows = 12; /* rows of sums in registers ... */
  static constexpr int kWideBothHalves = 6; /* ... of 32 output rows up to so many, of 16 above */
  /* Widened activations that share L2 with weights, and rows of them that are taken in any case. */
  static constexpr int64_t kWideFloatBytes = 768 << 10, kWideFloatLeast = 12;

  static KTC_INLINE __mmask16 first(int n) { return __mmask16((1u << n) - 1u); }

  static KTC_INLINE F zero() { return _mm512_setzero_ps(); }
  static KTC_INLINE F set1(float x) { return _mm512_set1_ps(x); }
  static KTC_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  static KTC_INLINE F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static KTC_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a); }
  static KTC_INLINE void store_past(float* p, F a) { _mm512_stream_ps(p, a); }
  static KTC_INLINE void fence_past() { _mm_sfence(); }
  static KTC_INLINE void store_n(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }
  static KTC_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
  static KTC_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static KTC_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static KTC_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
  static KTC_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
  static KTC_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
  static KTC_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static KTC_INLINE F fma_exact(F a, F b, F acc) { return _mm512_fmadd_ps(a, b, acc); }

  static KTC_INLINE I izero() { return _mm512_setzero_si512(); }
  static KTC_INLINE I iset1(int32_t x) { return _mm512_set1_epi32(x); }
  static KTC_INLINE I iload(const int32_t* p) { return _mm512_loadu_si512(p); }
  static KTC_INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
  static KTC_INLINE I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
  static KTC_INLINE I iand(I a, I b) { return _mm512_and_si512(a, b); }
  static KTC_INLINE I ior(I a, I b) { return _mm512_or_si512(a, b); }
  static KTC_INLINE I imax(I a, I b) { return _mm512_max_epi32(a, b); }
  static KTC_INLINE I select_nan(F x, I if_nan, I otherwise) {
    return _mm512_mask_mov_epi32(otherwise, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), if_nan);
  }
  template <int N>
  static KTC_INLINE I shl(I a) {
    return _mm512_slli_epi32(a, N);
  }
  template <int N>
  static KTC_INLINE I shr(I a) {
    return _mm512_srli_epi32(a, N);
  }
  static KTC_INLINE int32_t isum(I a) { return _mm512_reduce_add_epi32(a); }
  static KTC_INLINE bool iany_above(I a, int32_t bound) {
    return _mm512_cmpgt_epi32_mask(a, _mm512_set1_epi32(bound)) != 0;
  }
  static KTC_INLINE int32_t imax_lane(I a) { return _mm512_reduce_max_epi32(a); }

  static KTC_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
  static KTC_INLINE I round(F a) {
    return _mm512_sub_epi32(_mm512_castps_si512(_mm512_add_ps(a, _mm512_set1_ps(12582912.0f))),
                            _mm512_set1_epi32(0x4B400000));
  }
  static KTC_INLINE I bits(F a) { return _mm512_castps_si512(a); }
  static KTC_INLINE F from_bits(I a) { return _mm512_castsi512_ps(a); }
  static KTC_INLINE void store_low8(uint8_t* p, I a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
  }
  static KTC_INLINE void store_low16(uint8_t* p, I a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
  }

  static KTC_INLINE B bload(const uint8_t* p) { return _mm512_loadu_si512(p); }
  static KTC_INLINE void bstore(uint8_t* p, B a) { _mm512_storeu_si512(p, a); }
  static KTC_INLINE I dot(I acc, B w, I x) { return _mm512_dpbusd_epi32(acc, w, x); }
  static KTC_INLINE void nibbles(B a, B* lo, B* hi) {
    const B low = _mm512_set1_epi8(15);
    *lo = _mm512_and_si512(a, low);
    *hi = _mm512_and_si512(_mm512_srli_epi16(a, 4), low);
  }
  struct Mult {
    I mult, offset; /* mult in both 16-bit halves of a lane; 128 - 8 * mult in all bytes */
  };
  static KTC_INLINE Mult load_mult(const uint8_t* p) {
    const I m = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const I m16 = _mm512_or_si512(m, _mm512_slli_epi32(m, 16));
    const I m8 = _mm512_or_si512(m16, _mm512_slli_epi32(m16, 8));
    return Mult{m16, _mm512_sub_epi8(_mm512_set1_epi8(-128), _mm512_slli_epi32(m8, 3))};
  }
  /* 15 * 16 < 256: 16-bit products never carry into the neighbouring byte. */
  static KTC_INLINE B scale_nibbles(B nib, const Mult& m) {
    return _mm512_add_epi8(_mm512_mullo_epi16(nib, m.mult), m.offset);
  }
  /* Selectors of one half, each in all 4 bytes of its lane. */
  static KTC_INLINE I spread_select(const uint8_t* p) {
    const I spread = _mm512_set_epi32(0x0f0f0f0f, 0x0e0e0e0e, 0x0d0d0d0d, 0x0c0c0c0c, 0x0b0b0b0b, 0x0a0a0a0a,
                                      0x09090909, 0x08080808, 0x07070707, 0x06060606, 0x05050505, 0x04040404,
                                      0x03030303, 0x02020202, 0x01010101, 0x00000000);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), spread);
  }
#ifdef __AVX512VBMI__
  /* All levels of the eight positive selectors are 128 bytes: two byte permutations look them up. */
  struct Select {
    I row; /* selector & 3 in bits 4-5: where its levels begin in a table of 64; other bits are not looked at
            */
    __mmask64 second, negate; /* selector & 4: the second table; selector & 8 */
  };
  static KTC_INLINE void load_select(const uint8_t* p, Select* lo, Select* hi) {
    const I s = spread_select(p);
    *lo = Select{_mm512_slli_epi16(s, 4), _mm512_test_epi8_mask(s, _mm512_set1_epi8(4)),
                 _mm512_test_epi8_mask(s, _mm512_set1_epi8(8))};
    *hi = Select{s, _mm512_test_epi8_mask(s, _mm512_set1_epi8(64)), _mm512_movepi8_mask(s)};
  }
  /* Negating a byte around 128 negates the level. */
  static KTC_INLINE B levels(B nib, const Select& s) {
    static constexpr CodebookBytes kBytes = codebook_bytes();
    const I t0 = _mm512_load_si512(kBytes.at[0]), t1 = _mm512_load_si512(kBytes.at[4]);
    /* bits 0-3 of nib, the others of row; a byte permutation takes bits 0-5 */
    const B at = _mm512_ternarylogic_epi32(nib, _mm512_set1_epi8(15), s.row, 0xe2);
    const B w = _mm512_mask_permutexvar_epi8(_mm512_permutexvar_epi8(at, t0), s.second, at, t1);
    return _mm512_mask_sub_epi8(w, s.negate, _mm512_setzero_si512(), w);
  }
  static KTC_INLINE void codebook(B a, const Select& lo, const Select& hi, B* w0, B* w1) {
    *w0 = levels(a, lo);
    *w1 = levels(_mm512_srli_epi16(a, 4), hi);
  }
#else
  struct Select {
    I even, odd; /* twice the multiplier in the even / odd bytes of a lane, 0 elsewhere */
    __mmask64 negate;
  };
  static KTC_INLINE void load_select(const uint8_t* p, Select* lo, Select* hi) {
    alignas(16) static constexpr uint8_t kTwice[16] = {
        2 * kCodebookMult[0], 2 * kCodebookMult[1], 2 * kCodebookMult[2], 2 * kCodebookMult[3],
        2 * kCodebookMult[4], 2 * kCodebookMult[5], 2 * kCodebookMult[6], 2 * kCodebookMult[7],
        2 * kCodebookMult[0], 2 * kCodebookMult[1], 2 * kCodebookMult[2], 2 * kCodebookMult[3],
        2 * kCodebookMult[4], 2 * kCodebookMult[5], 2 * kCodebookMult[6], 2 * kCodebookMult[7]};
    const I twice = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kTwice)));
    const I s = spread_select(p), even = _mm512_set1_epi16(255);
    B s0, s1;
    nibbles(s, &s0, &s1);
    const I t0 = _mm512_shuffle_epi8(twice, s0), t1 = _mm512_shuffle_epi8(twice, s1);
    *lo = Select{_mm512_and_si512(t0, even), _mm512_andnot_si512(even, t0),
                 _mm512_test_epi8_mask(s, _mm512_set1_epi8(8))};
    *hi = Select{_mm512_and_si512(t1, even), _mm512_andnot_si512(even, t1), _mm512_movepi8_mask(s)};
  }
  /* A product c * 2m + 128 + 2^15 has the byte in its upper half; negating a byte around 128 negates the
   * level. */
  static KTC_INLINE B levels(B nib, const Select& s) {
    const __m128i book = _mm_loadu_si128(reinterpret_cast<const __m128i*>(kCodebook));
    const I c = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(book), nib);
    const I round = _mm512_set1_epi16(int16_t(0x8080)), upper = _mm512_set1_epi16(int16_t(0xff00));
    const I even = _mm512_srli_epi16(_mm512_add_epi16(_mm512_maddubs_epi16(s.even, c), round), 8);
    const I odd = _mm512_add_epi16(_mm512_maddubs_epi16(s.odd, c), round);
    const B w = _mm512_ternarylogic_epi32(even, odd, upper, 0xf8); /* even | (odd & upper) */
    return _mm512_mask_sub_epi8(w, s.negate, _mm512_setzero_si512(), w);
  }
  static KTC_INLINE void codebook(B a, const Select& lo, const Select& hi, B* w0, B* w1) {
    B n0, n1;
    nibbles(a, &n0, &n1);
    *w0 = levels(n0, lo);
    *w1 = levels(n1, hi);
  }
#endif
  static KTC_INLINE F bf16_even(B a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
  static KTC_INLINE F bf16_odd(B a) {
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(int32_t(0xffff0000u))));
  }
  static KTC_INLINE void settle(F*) {}
  /* 64 bytes of bf16 activations -> 64 bytes for even and 64 for odd k, as fp32. */
  template <bool Integer>
  static KTC_INLINE void widen(const uint8_t* p, uint8_t* out) {
    static_assert(!Integer, "bytes are multiplied as they are");
    const B x = bload(p);
    _mm512_storeu_ps(out, bf16_even(x));
    _mm512_storeu_ps(out + 64, bf16_odd(x));
  }
  static KTC_INLINE void prefetch(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
  }
  static KTC_INLINE void prefetch_l2(const uint8_t* p) {
    _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T1);
  }
  /* Decoded as a no-op where it does not exist, so no feature is required for it. */
  static KTC_INLINE void prefetch_write(const void* p) {
    asm volatile("prefetchw %0" ::"m"(*static_cast<const char*>(p)));
  }
};

}  // namespace isa
}  // namespace ktc
#endif  // KTC_ISA_AVX512_H
