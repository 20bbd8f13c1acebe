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

  static constexpr int kIntRows = 8;
  static constexpr int kFloatRows = 4;

  static KTC_INLINE __mmask16 first(int n) { return __mmask16((1u << n) - 1u); }

  static KTC_INLINE F zero() { return _mm512_setzero_ps(); }
  static KTC_INLINE F set1(float x) { return _mm512_set1_ps(x); }
  static KTC_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
  static KTC_INLINE F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
  static KTC_INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a); }
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
  static KTC_INLINE F bf16_even(B a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
  static KTC_INLINE F bf16_odd(B a) {
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(int32_t(0xffff0000u))));
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
