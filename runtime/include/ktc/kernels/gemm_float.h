/* bf16 and fp32 GEMM on vectors.
 *
 * bf16: products of two bf16 are exact in fp32, so a shift, a mask and two FMAs per 64 bytes give the
 * same bits with and without fused instructions; even and odd k have an accumulator each (their order is
 * part of the result). fp32 is the oracle: sums of 16 k first, then the sums, never fused.
 */
#ifndef KTC_KERNELS_GEMM_FLOAT_H
#define KTC_KERNELS_GEMM_FLOAT_H

#include "ktc/kernels/epilogue.h"

namespace ktc {

template <class S, class V, int R>
KTC_INLINE void bf16_rows(const ktc_gemm_args& a, int epilogue, const uint8_t* tiles, int64_t k, int64_t m,
                          int64_t b, int64_t valid) {
  using F = typename V::F;
  const int64_t steps = S::steps(k);
  const uint8_t* x = act_row(a.act, m, steps);
  const uint8_t* const weights = weights_end<S>(a, k);
  F acc[R][2][2]; /* [row][half][even, odd] */
  for (int r = 0; r < R; ++r) {
    for (int h = 0; h < 2; ++h) acc[r][h][0] = acc[r][h][1] = V::zero();
  }
  for (int64_t s = 0; s < steps; ++s) {
    const uint8_t* w = tiles + s * 2 * kTile;
    const uint8_t* xs = x + s * kTile;
#pragma GCC unroll 4
    for (int64_t i = 0; i < 16; ++i) {
      call_ahead<V>(w + 2 * i * kRowBytes, weights);
      F we[2], wo[2];
      for (int h = 0; h < 2; ++h) {
        const uint8_t* p = w + h * kTile + i * kRowBytes;
        const typename V::B line = V::bload(p);
        we[h] = V::bf16_even(line);
        wo[h] = V::bf16_odd(line);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const uint32_t pair = uint32_t(load_i32(xs + r * kRowBytes + 4 * i));
        const F xe = V::from_bits(V::iset1(int32_t(pair << 16)));
        const F xo = V::from_bits(V::iset1(int32_t(pair & 0xffff0000u)));
        for (int h = 0; h < 2; ++h) {
          acc[r][h][0] = V::fma_exact(we[h], xe, acc[r][h][0]);
          acc[r][h][1] = V::fma_exact(wo[h], xo, acc[r][h][1]);
        }
      }
    }
  }
  for (int r = 0; r < R && r < valid; ++r) {
    finish_float<S, V>(a, epilogue, m + r, b, V::add(acc[r][0][0], acc[r][0][1]),
                       V::add(acc[r][1][0], acc[r][1][1]));
  }
}

template <class S, class V, int R>
KTC_INLINE void fp32_rows(const ktc_gemm_args& a, int epilogue, const uint8_t* tiles, int64_t k, int64_t m,
                          int64_t b, int64_t valid) {
  using F = typename V::F;
  const int64_t steps = S::steps(k);
  const uint8_t* x = act_row(a.act, m, steps);
  F acc[R][2];
  for (int r = 0; r < R; ++r) acc[r][0] = acc[r][1] = V::zero();
  for (int64_t s = 0; s < steps; ++s) {
    const float* w = reinterpret_cast<const float*>(tiles + s * 2 * kTile);
    F part[R][2];
    for (int r = 0; r < R; ++r) part[r][0] = part[r][1] = V::zero();
    for (int64_t i = 0; i < 16; ++i) {
      const F w0 = V::load(w + 16 * i), w1 = V::load(w + 256 + 16 * i);
      for (int r = 0; r < R; ++r) {
        const F xv = V::from_bits(V::iset1(load_i32(x + s * kTile + r * kRowBytes + 4 * i)));
        part[r][0] = V::add(part[r][0], V::mul(w0, xv));
        part[r][1] = V::add(part[r][1], V::mul(w1, xv));
      }
    }
    for (int r = 0; r < R; ++r) {
      acc[r][0] = V::add(acc[r][0], part[r][0]);
      acc[r][1] = V::add(acc[r][1], part[r][1]);
    }
  }
  for (int r = 0; r < R && r < valid; ++r) finish_float<S, V>(a, epilogue, m + r, b, acc[r][0], acc[r][1]);
}

/* Tails as in gemm_dot.h. */
template <class S, class V, int R>
KTC_INLINE void float_sweep(const ktc_gemm_args& a, int epilogue, const uint8_t* tiles, int64_t k, int64_t m,
                            int64_t b) {
  for (; a.m_end - m > R / 2; m += R) {
    const int64_t valid = min64(R, a.m_end - m);
    if constexpr (S::kFormat == KTC_BF16) {
      bf16_rows<S, V, R>(a, epilogue, tiles, k, m, b, valid);
    } else {
      fp32_rows<S, V, R>(a, epilogue, tiles, k, m, b, valid);
    }
  }
  if constexpr (R > 1) float_sweep<S, V, R / 2>(a, epilogue, tiles, k, m, b);
}

template <class S, class V>
KTC_NOINLINE void gemm_float(const ktc_gemm_args& a, int epilogue) {
  const int64_t k = S::k(a.k);
  for (int64_t b = a.block_begin; b < a.block_end; ++b) {
    float_sweep<S, V, V::kFloatRows>(a, epilogue, a.weight.tiles + b * S::block_bytes(k), k, a.m_begin, b);
  }
}

}  // namespace ktc
#endif  // KTC_KERNELS_GEMM_FLOAT_H
