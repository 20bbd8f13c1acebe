/* Primitives of AVX2 + FMA, 16 lanes in two registers. Meanings as in isa/scalar.h.
 *
 * Compiled with AVX-VNNI the byte dot product is one instruction; without it bytes are widened to 16 bits
 * first (vpmaddubsw would saturate: 255 * 127 * 2 does not fit 16 bits).
 */
#ifndef KTC_ISA_AVX2_H
#define KTC_ISA_AVX2_H

#include <immintrin.h>

#include "ktc/kernels/common.h"

namespace ktc {
namespace isa {

struct Avx2 {
  struct F {
    __m256 v[2];
  };
  struct I {
    __m256i v[2];
  };
  using B = I;

  static constexpr int kIntRows = 2, kMostIntRows = 2;
  static constexpr int kFloatRows = 1;
#ifdef __AVXVNNI__
  static constexpr bool kWideInt = false;
#else
  static constexpr bool kWideInt = true; /* bytes are multiplied as 16-bit pairs: gemm_wide.h */
#endif
  static constexpr bool kWideFloat = true;
  static constexpr bool kDotFloat = false, kPagesByTurns = true;
  static constexpr int kWideFloatRows = 3, kWideBothHalves = 0; /* as in avx512.h */
  static constexpr int64_t kWideFloatBytes = 192 << 10, kWideFloatLeast = 24;

#define KTC_BOTH(T, expr)                      \
  T r;                                         \
  for (int i = 0; i < 2; ++i) r.v[i] = (expr); \
  return r

  /* All ones in the first n of 16 lanes. */
  static KTC_INLINE I first(int n) {
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    KTC_BOTH(I, _mm256_cmpgt_epi32(_mm256_set1_epi32(n - 8 * i), lane));
  }

  static KTC_INLINE F zero() { KTC_BOTH(F, _mm256_setzero_ps()); }
  static KTC_INLINE F set1(float x) { KTC_BOTH(F, _mm256_set1_ps(x)); }
  static KTC_INLINE F load(const float* p) { KTC_BOTH(F, _mm256_loadu_ps(p + 8 * i)); }
  static KTC_INLINE F load_n(const float* p, int n) {
    const I mask = first(n);
    KTC_BOTH(F, _mm256_maskload_ps(p + 8 * i, mask.v[i]));
  }
  static KTC_INLINE void store(float* p, F a) {
    for (int i = 0; i < 2; ++i) _mm256_storeu_ps(p + 8 * i, a.v[i]);
  }
  static KTC_INLINE void store_past(float* p, F a) {
    for (int i = 0; i < 2; ++i) _mm256_stream_ps(p + 8 * i, a.v[i]);
  }
  static KTC_INLINE void fence_past() { _mm_sfence(); }
  static KTC_INLINE void store_n(float* p, F a, int n) {
    const I mask = first(n);
    for (int i = 0; i < 2; ++i) _mm256_maskstore_ps(p + 8 * i, mask.v[i], a.v[i]);
  }
  static KTC_INLINE F add(F a, F b) { KTC_BOTH(F, _mm256_add_ps(a.v[i], b.v[i])); }
  static KTC_INLINE F sub(F a, F b) { KTC_BOTH(F, _mm256_sub_ps(a.v[i], b.v[i])); }
  static KTC_INLINE F mul(F a, F b) { KTC_BOTH(F, _mm256_mul_ps(a.v[i], b.v[i])); }
  static KTC_INLINE F div(F a, F b) { KTC_BOTH(F, _mm256_div_ps(a.v[i], b.v[i])); }
  static KTC_INLINE F min(F a, F b) { KTC_BOTH(F, _mm256_min_ps(a.v[i], b.v[i])); }
  static KTC_INLINE F max(F a, F b) { KTC_BOTH(F, _mm256_max_ps(a.v[i], b.v[i])); }
  static KTC_INLINE F fma(F a, F b, F c) { KTC_BOTH(F, _mm256_fmadd_ps(a.v[i], b.v[i], c.v[i])); }
  static KTC_INLINE F fma_exact(F a, F b, F acc) { KTC_BOTH(F, _mm256_fmadd_ps(a.v[i], b.v[i], acc.v[i])); }

  static KTC_INLINE I izero() { KTC_BOTH(I, _mm256_setzero_si256()); }
  static KTC_INLINE I iset1(int32_t x) { KTC_BOTH(I, _mm256_set1_epi32(x)); }
  static KTC_INLINE I iload(const int32_t* p) {
    KTC_BOTH(I, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + i));
  }
  static KTC_INLINE I iadd(I a, I b) { KTC_BOTH(I, _mm256_add_epi32(a.v[i], b.v[i])); }
  static KTC_INLINE I isub(I a, I b) { KTC_BOTH(I, _mm256_sub_epi32(a.v[i], b.v[i])); }
  static KTC_INLINE I iand(I a, I b) { KTC_BOTH(I, _mm256_and_si256(a.v[i], b.v[i])); }
  static KTC_INLINE I ior(I a, I b) { KTC_BOTH(I, _mm256_or_si256(a.v[i], b.v[i])); }
  static KTC_INLINE I imax(I a, I b) { KTC_BOTH(I, _mm256_max_epi32(a.v[i], b.v[i])); }
  static KTC_INLINE I select_nan(F x, I if_nan, I otherwise) {
    KTC_BOTH(I, _mm256_blendv_epi8(otherwise.v[i], if_nan.v[i],
                                   _mm256_castps_si256(_mm256_cmp_ps(x.v[i], x.v[i], _CMP_UNORD_Q))));
  }
  template <int N>
  static KTC_INLINE I shl(I a) {
    KTC_BOTH(I, _mm256_slli_epi32(a.v[i], N));
  }
  template <int N>
  static KTC_INLINE I shr(I a) {
    KTC_BOTH(I, _mm256_srli_epi32(a.v[i], N));
  }
  static KTC_INLINE int32_t isum(I a) {
    const __m256i s = _mm256_add_epi32(a.v[0], a.v[1]);
    __m128i t = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    t = _mm_add_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
  }
  static KTC_INLINE bool iany_above(I a, int32_t bound) {
    const __m256i top = _mm256_max_epi32(a.v[0], a.v[1]);
    return _mm256_movemask_epi8(_mm256_cmpgt_epi32(top, _mm256_set1_epi32(bound))) != 0;
  }
  static KTC_INLINE int32_t imax_lane(I a) {
    const __m256i s = _mm256_max_epi32(a.v[0], a.v[1]);
    __m128i t = _mm_max_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    t = _mm_max_epi32(t, _mm_shuffle_epi32(t, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(t, _mm_shuffle_epi32(t, 0xb1)));
  }

  static KTC_INLINE F to_float(I a) { KTC_BOTH(F, _mm256_cvtepi32_ps(a.v[i])); }
  static KTC_INLINE I round(F a) {
    KTC_BOTH(I, _mm256_sub_epi32(_mm256_castps_si256(_mm256_add_ps(a.v[i], _mm256_set1_ps(12582912.0f))),
                                 _mm256_set1_epi32(0x4B400000)));
  }
  static KTC_INLINE I bits(F a) { KTC_BOTH(I, _mm256_castps_si256(a.v[i])); }
  static KTC_INLINE F from_bits(I a) { KTC_BOTH(F, _mm256_castsi256_ps(a.v[i])); }
  static KTC_INLINE void store_low8(uint8_t* p, I a) {
    for (int i = 0; i < 2; ++i) {
      /* The low bytes of a 128-bit half end up in its first 4 bytes, then both halves side by side. */
      const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                            0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
      const __m256i t = _mm256_shuffle_epi8(a.v[i], pick);
      const __m128i both = _mm_unpacklo_epi32(_mm256_castsi256_si128(t), _mm256_extracti128_si256(t, 1));
      _mm_storel_epi64(reinterpret_cast<__m128i*>(p + 8 * i), both);
    }
  }
  static KTC_INLINE void store_low16(uint8_t* p, I a) {
    const __m256i low = _mm256_set1_epi32(0xffff);
    __m256i t = _mm256_packus_epi32(_mm256_and_si256(a.v[0], low), _mm256_and_si256(a.v[1], low));
    t = _mm256_permute4x64_epi64(t, 0xd8); /* undo the interleaving of 128-bit halves */
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), t);
  }

  static KTC_INLINE B bload(const uint8_t* p) { return iload(reinterpret_cast<const int32_t*>(p)); }
  static KTC_INLINE void bstore(uint8_t* p, B a) {
    for (int i = 0; i < 2; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + i, a.v[i]);
  }
  static KTC_INLINE I dot(I acc, B w, I x) {
#ifdef __AVXVNNI__
    KTC_BOTH(I, _mm256_dpbusd_avx_epi32(acc.v[i], w.v[i], x.v[i]));
#else
    /* Bytes 0, 2 and bytes 1, 3 of every lane as 16-bit pairs: two vpmaddwd, no lane crossing. */
    const __m256i x_even = _mm256_srai_epi16(_mm256_slli_epi16(x.v[0], 8), 8);
    const __m256i x_odd = _mm256_srai_epi16(x.v[0], 8);
    const __m256i low = _mm256_set1_epi16(255);
    KTC_BOTH(I, _mm256_add_epi32(
                    _mm256_add_epi32(acc.v[i], _mm256_madd_epi16(_mm256_and_si256(w.v[i], low), x_even)),
                    _mm256_madd_epi16(_mm256_srli_epi16(w.v[i], 8), x_odd)));
#endif
  }
  static KTC_INLINE void nibbles(B a, B* lo, B* hi) {
    const __m256i low = _mm256_set1_epi8(15);
    for (int i = 0; i < 2; ++i) {
      lo->v[i] = _mm256_and_si256(a.v[i], low);
      hi->v[i] = _mm256_and_si256(_mm256_srli_epi16(a.v[i], 4), low);
    }
  }
  struct Mult {
    I mult, offset; /* mult in both 16-bit halves of a lane; 128 - 8 * mult in all bytes */
  };
  static KTC_INLINE Mult load_mult(const uint8_t* p) {
    Mult r;
    for (int i = 0; i < 2; ++i) {
      const __m256i m = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i)));
      const __m256i m16 = _mm256_or_si256(m, _mm256_slli_epi32(m, 16));
      const __m256i m8 = _mm256_or_si256(m16, _mm256_slli_epi32(m16, 8));
      r.mult.v[i] = m16;
      r.offset.v[i] = _mm256_sub_epi8(_mm256_set1_epi8(-128), _mm256_slli_epi32(m8, 3));
    }
    return r;
  }
  /* 15 * 16 < 256: 16-bit products never carry into the neighbouring byte. */
  static KTC_INLINE B scale_nibbles(B nib, const Mult& m) {
    KTC_BOTH(B, _mm256_add_epi8(_mm256_mullo_epi16(nib.v[i], m.mult.v[i]), m.offset.v[i]));
  }
  struct Select {
    I even, odd; /* twice the multiplier in the even / odd bytes of a lane, 0 elsewhere */
    I sign;      /* 1 or -1 in all bytes */
  };
  static KTC_INLINE void load_select(const uint8_t* p, Select* lo, Select* hi) {
    constexpr const uint8_t (&m)[8] = kCodebookMult;
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_setr_epi8(
        char(2 * m[0]), char(2 * m[1]), char(2 * m[2]), char(2 * m[3]), char(2 * m[4]), char(2 * m[5]),
        char(2 * m[6]), char(2 * m[7]), char(2 * m[0]), char(2 * m[1]), char(2 * m[2]), char(2 * m[3]),
        char(2 * m[4]), char(2 * m[5]), char(2 * m[6]), char(2 * m[7])));
    const __m256i sign =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1));
    const __m256i spread = _mm256_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3,  //
                                            4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
    const __m256i low = _mm256_set1_epi8(15), even = _mm256_set1_epi16(255);
    for (int i = 0; i < 2; ++i) {
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * i));
      const __m256i both = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(bytes), spread);
      Select* const halves[2] = {lo, hi};
      for (int h = 0; h < 2; ++h) {
        const __m256i s = _mm256_and_si256(h ? _mm256_srli_epi16(both, 4) : both, low);
        const __m256i t = _mm256_shuffle_epi8(twice, s);
        halves[h]->even.v[i] = _mm256_and_si256(t, even);
        halves[h]->odd.v[i] = _mm256_andnot_si256(even, t);
        halves[h]->sign.v[i] = _mm256_shuffle_epi8(sign, s);
      }
    }
  }
  /* One half: nibbles -> level + 128. A product c * 2m + 128 + 2^15 has the byte in its upper half; negating
   * a byte around 128 negates the level. */
  static KTC_INLINE __m256i levels(__m256i nib, __m256i m_even, __m256i m_odd, __m256i sign) {
    const __m256i c = _mm256_shuffle_epi8(
        _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(kCodebook))), nib);
    const __m256i round = _mm256_set1_epi16(int16_t(0x8080)), upper = _mm256_set1_epi16(int16_t(0xff00));
    const __m256i even = _mm256_srli_epi16(_mm256_add_epi16(_mm256_maddubs_epi16(m_even, c), round), 8);
    const __m256i odd = _mm256_and_si256(_mm256_add_epi16(_mm256_maddubs_epi16(m_odd, c), round), upper);
    return _mm256_sign_epi8(_mm256_or_si256(even, odd), sign);
  }
  static KTC_INLINE void codebook(B a, const Select& lo, const Select& hi, B* w0, B* w1) {
    B n0, n1;
    nibbles(a, &n0, &n1);
    for (int i = 0; i < 2; ++i) {
      w0->v[i] = levels(n0.v[i], lo.even.v[i], lo.odd.v[i], lo.sign.v[i]);
      w1->v[i] = levels(n1.v[i], hi.even.v[i], hi.odd.v[i], hi.sign.v[i]);
    }
  }
  /* 16 lanes of four weights as 16-bit pairs: 0 and 2, 1 and 3. */
  struct W {
    I even, odd;
  };
  static KTC_INLINE W words(B a) {
    W w;
    for (int i = 0; i < 2; ++i) {
      w.even.v[i] = _mm256_and_si256(a.v[i], _mm256_set1_epi16(255));
      w.odd.v[i] = _mm256_srli_epi16(a.v[i], 8);
    }
    return w;
  }
  /* Signed weights -> bytes around 128. */
  static KTC_INLINE B bytes(const W& w) {
    const __m256i low = _mm256_set1_epi16(255), middle = _mm256_set1_epi8(-128);
    KTC_BOTH(B, _mm256_xor_si256(
                    _mm256_or_si256(_mm256_and_si256(w.even.v[i], low), _mm256_slli_epi16(w.odd.v[i], 8)),
                    middle));
  }
  /* acc + the two products of each lane's pair. */
  static KTC_INLINE I madd(I acc, I w, I x) {
    KTC_BOTH(I, _mm256_add_epi32(acc.v[i], _mm256_madd_epi16(w.v[i], x.v[i])));
  }
  /* Now, in a register: the compiler would add products first, or begin the next ones, and run out of them.
   */
  static KTC_INLINE void settle(I* a) { asm("" : "+x"(a->v[0]), "+x"(a->v[1])); }
  static KTC_INLINE void settle(F* a) { asm("" : "+x"(a->v[0]), "+x"(a->v[1])); }
  /* 64 bytes of activations -> 64 bytes for even and 64 for odd k: pairs of 16-bit integers, or bf16 as fp32.
   */
  template <bool Integer>
  static KTC_INLINE void widen(const uint8_t* p, uint8_t* out) {
    const B x = bload(p);
    I even, odd;
    for (int i = 0; i < 2; ++i) {
      if (Integer) {
        even.v[i] = _mm256_srai_epi16(_mm256_slli_epi16(x.v[i], 8), 8);
        odd.v[i] = _mm256_srai_epi16(x.v[i], 8);
      } else {
        even.v[i] = _mm256_slli_epi32(x.v[i], 16);
        odd.v[i] = _mm256_and_si256(x.v[i], _mm256_set1_epi32(int32_t(0xffff0000u)));
      }
    }
    bstore(out, even);
    bstore(out + 64, odd);
  }
  /* What turns the nibbles of a group into signed 16-bit weights, for 16 output rows: avx2_wide.h. */
  template <bool Codebook>
  struct WideScale;
  static KTC_INLINE F bf16_even(B a) { KTC_BOTH(F, _mm256_castsi256_ps(_mm256_slli_epi32(a.v[i], 16))); }
  static KTC_INLINE F bf16_odd(B a) {
    KTC_BOTH(F, _mm256_castsi256_ps(_mm256_and_si256(a.v[i], _mm256_set1_epi32(int32_t(0xffff0000u)))));
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
#undef KTC_BOTH
};

}  // namespace isa
}  // namespace ktc
#include "ktc/isa/avx2_wide.h"

#endif  // KTC_ISA_AVX2_H
