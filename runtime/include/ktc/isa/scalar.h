/* Primitives of portable C++ (GNU vector extensions, no intrinsics): what each primitive means.
 *
 * Every isa header offers one struct with the same members; algorithms (kernels/) are templates over
 * it. F, I and B are 16 lanes of float, of int32, and of 4 bytes. Where results could differ between
 * instruction sets, the definition here is the contract (min/max with a NaN, what is fused and what is not).
 */
#ifndef KTC_ISA_SCALAR_H
#define KTC_ISA_SCALAR_H

#include <stdint.h>
#include <string.h>

#include "ktc/kernels/common.h"

namespace ktc {
namespace isa {

struct Scalar {
  using F = float __attribute__((vector_size(64)));
  using I = int32_t __attribute__((vector_size(64)));
  using U = uint32_t __attribute__((vector_size(64)));
  using H = int16_t __attribute__((vector_size(64)));
  using W = uint16_t __attribute__((vector_size(64)));
  using B = uint8_t __attribute__((vector_size(64)));

  static constexpr int kIntRows = 1;     /* rows of activations kept in registers: integer formats */
  static constexpr int kFloatRows = 1;   /* the same for group scales, bf16 and fp32               */
  static constexpr int kMostIntRows = 1; /* of integers in one pass, if there are no more rows than that */
  static constexpr bool kWideInt = false, kWideFloat = false; /* kernels of gemm_wide.h */
  static constexpr bool kDotFloat = false;    /* `dot` of bf16 pairs: the kernels of integers for bf16 too */
  static constexpr bool kPagesByTurns = true; /* how weights are called from DRAM: common.h */

  template <class T>
  static KTC_INLINE T get(const void* p) {
    T r;
    memcpy(&r, p, sizeof r);
    return r;
  }

  static KTC_INLINE F zero() { return F{}; }
  static KTC_INLINE F set1(float x) { return x - F{}; }
  static KTC_INLINE F load(const float* p) { return get<F>(p); }
  static KTC_INLINE F load_n(const float* p, int n) {
    F r{};
    memcpy(&r, p, sizeof(float) * size_t(n));
    return r;
  }
  static KTC_INLINE void store(float* p, F a) { memcpy(p, &a, sizeof a); }
  /* Past the caches, where that exists; `fence_past` before anybody else reads it. */
  static KTC_INLINE void store_past(float* p, F a) { store(p, a); }
  static KTC_INLINE void fence_past() {}
  static KTC_INLINE void store_n(float* p, F a, int n) { memcpy(p, &a, sizeof(float) * size_t(n)); }
  static KTC_INLINE F add(F a, F b) { return a + b; }
  static KTC_INLINE F sub(F a, F b) { return a - b; }
  static KTC_INLINE F mul(F a, F b) { return a * b; }
  static KTC_INLINE F div(F a, F b) { return a / b; }
  static KTC_INLINE F min(F a, F b) { return a < b ? a : b; } /* b if either is a NaN */
  static KTC_INLINE F max(F a, F b) { return a > b ? a : b; } /* b if either is a NaN */
  /* a * b + c, rounded once. The sum in double is rounded to odd first, so that the rounding to float sees
   * on which side of a tie it was. */
  static KTC_INLINE F fma(F a, F b, F c) {
    F r;
    for (int i = 0; i < 16; ++i) {
      const double p = double(a[i]) * double(b[i]), s = p + double(c[i]); /* p is exact */
      const double t = s - p, error = (p - (s - t)) + (double(c[i]) - t);
      int64_t u;
      memcpy(&u, &s, sizeof u);
      if ((error > 0 || error < 0) && (u & 1) == 0) u += (error > 0) == (s > 0) ? 1 : -1;
      double odd;
      memcpy(&odd, &u, sizeof odd);
      r[i] = float(odd);
    }
    return r;
  }
  /* acc + a * b where the product is exact in fp32 (bf16 operands): fused or not, the bits agree. */
  static KTC_INLINE F fma_exact(F a, F b, F acc) { return acc + a * b; }

  static KTC_INLINE I izero() { return I{}; }
  static KTC_INLINE I iset1(int32_t x) { return x - I{}; }
  static KTC_INLINE I iload(const int32_t* p) { return get<I>(p); }
  static KTC_INLINE I iadd(I a, I b) { return I(U(a) + U(b)); }
  static KTC_INLINE I isub(I a, I b) { return I(U(a) - U(b)); }
  static KTC_INLINE I iand(I a, I b) { return a & b; }
  static KTC_INLINE I ior(I a, I b) { return a | b; }
  static KTC_INLINE I imax(I a, I b) { return a > b ? a : b; }
  static KTC_INLINE I select_nan(F x, I if_nan, I otherwise) { return x != x ? if_nan : otherwise; }
  template <int N>
  static KTC_INLINE I shl(I a) {
    return I(U(a) << N);
  }
  template <int N>
  static KTC_INLINE I shr(I a) {
    return I(U(a) >> N);
  }
  static KTC_INLINE int32_t isum(I a) {
    uint32_t s = 0;
    for (int i = 0; i < 16; ++i) s += uint32_t(a[i]);
    return int32_t(s);
  }
  static KTC_INLINE bool iany_above(I a, int32_t bound) { return imax_lane(a) > bound; }
  static KTC_INLINE int32_t imax_lane(I a) {
    int32_t m = a[0];
    for (int i = 1; i < 16; ++i) m = a[i] > m ? a[i] : m;
    return m;
  }

  static KTC_INLINE F to_float(I a) { return __builtin_convertvector(a, F); }
  /* Nearest even, for |a| < 2^22: adding 1.5 * 2^23 leaves the integer in the low mantissa bits. */
  static KTC_INLINE I round(F a) { return I(a + 12582912.0f) - 0x4B400000; }
  static KTC_INLINE I bits(F a) { return I(a); }
  static KTC_INLINE F from_bits(I a) { return F(a); }
  static KTC_INLINE void store_low8(uint8_t* p, I a) {
    for (int i = 0; i < 16; ++i) p[i] = uint8_t(a[i]);
  }
  static KTC_INLINE void store_low16(uint8_t* p, I a) {
    for (int i = 0; i < 16; ++i) {
      const uint16_t h = uint16_t(a[i]);
      memcpy(p + 2 * i, &h, sizeof h);
    }
  }

  static KTC_INLINE B bload(const uint8_t* p) { return get<B>(p); }
  static KTC_INLINE void bstore(uint8_t* p, B a) { memcpy(p, &a, sizeof a); }
  /* x holds the same 4 signed bytes in every lane: acc[c] += sum_j w[4c + j] * x[j]. */
  static KTC_INLINE I dot(I acc, B w, I x) {
    /* 255 * 127 fits 16 bits: even and odd bytes are multiplied there, then widened. */
    const H x16 = H(x);
    const I even = I(H(U(w) & 0x00ff00ffu) * ((x16 << 8) >> 8));
    const I odd = I(H((U(w) >> 8) & 0x00ff00ffu) * (x16 >> 8));
    return acc + (((even << 16) >> 16) + (even >> 16)) + (((odd << 16) >> 16) + (odd >> 16));
  }
  static KTC_INLINE void nibbles(B a, B* lo, B* hi) {
    *lo = B(U(a) & 0x0f0f0f0fu);
    *hi = B((U(a) >> 4) & 0x0f0f0f0fu);
  }
  /* 16 multipliers as scale_nibbles wants them: one per lane, for its 4 bytes. */
  struct Mult {
    U mult, offset; /* mult in the low byte; 128 - 8 * mult in all bytes */
  };
  static KTC_INLINE Mult load_mult(const uint8_t* p) {
    using Bytes = uint8_t __attribute__((vector_size(16)));
    const U m = __builtin_convertvector(get<Bytes>(p), U);
    return Mult{m, (128u - 8u * m) * 0x01010101u};
  }
  /* nibble * mult + 128 - 8 * mult; 15 * 16 < 256, so 16-bit multiplications never carry over. */
  static KTC_INLINE B scale_nibbles(B nib, const Mult& m) {
    const W scaled = W(nib) * W(m.mult | m.mult << 16);
    return B(scaled) + B(m.offset);
  }
  /* The 16 selectors of one half of a block: bits 0-3 (lo) or 4-7 (hi) of 16 bytes. */
  struct Select {
    uint8_t s[16];
  };
  static KTC_INLINE void load_select(const uint8_t* p, Select* lo, Select* hi) {
    for (int c = 0; c < 16; ++c) {
      lo->s[c] = p[c] & 15;
      hi->s[c] = p[c] >> 4;
    }
  }
  /* 128 packed nibbles -> the bytes of both halves: level + 128. */
  static KTC_INLINE void codebook(B a, const Select& lo, const Select& hi, B* w0, B* w1) {
    static constexpr CodebookBytes kBytes = codebook_bytes();
    uint8_t in[64], out[2][64];
    memcpy(in, &a, sizeof in);
    for (int i = 0; i < 64; ++i) {
      out[0][i] = kBytes.at[lo.s[i / 4]][in[i] & 15];
      out[1][i] = kBytes.at[hi.s[i / 4]][in[i] >> 4];
    }
    *w0 = get<B>(out[0]);
    *w1 = get<B>(out[1]);
  }
  /* 32 bf16 in 16 lanes: the even and the odd ones as floats. */
  static KTC_INLINE F bf16_even(B a) { return F(U(a) << 16); }
  static KTC_INLINE F bf16_odd(B a) { return F(U(a) & 0xffff0000u); }
  static KTC_INLINE void prefetch(const uint8_t*) {}
  static KTC_INLINE void prefetch_l2(const uint8_t*) {}
  static KTC_INLINE void prefetch_write(const void*) {}
};

}  // namespace isa
}  // namespace ktc
#endif  // KTC_ISA_SCALAR_H
