/* int8 and int4 GEMM on vectors: few rows of activations, weights streamed once.
 *
 * R rows of activations stay in R x 2 registers of int32 while the lines of a 32-row block go by; a
 * line (4 k x 32 rows) is loaded, unpacked if need be, and multiplied with 4 broadcast activation
 * bytes per row. With more rows than registers, int4 blocks are unpacked once into scratch.
 */
#ifndef KTC_KERNELS_GEMM_INT_H
#define KTC_KERNELS_GEMM_INT_H

#include "ktc/kernels/epilogue.h"
#include "ktc/kernels/unpack.h"

namespace ktc {

constexpr int64_t kMaxPanelK = 8192; /* longer rows are unpacked again for each group of rows */

template <class S>
constexpr int64_t vector_scratch_bytes() {
  if (S::kFormat != KTC_INT4) return 0;
  return kBlockRows * (S::kK != 0 && S::kK < kMaxPanelK ? S::kK : kMaxPanelK);
}

/* Rows m..m+R of the activations against block b; the last R - valid of them are computed (they lie in
 * the same tile) but neither scaled nor written. */
template <class S, class V, int R, class Lines>
KTC_INLINE void int_rows(const ktc_gemm_args& a, int epilogue, Lines lines, int64_t k, int64_t m, int64_t b,
                         int64_t valid) {
  using I = typename V::I;
  using F = typename V::F;
  constexpr int64_t kRun = S::kRunK / 4; /* lines */
  const int64_t groups = S::groups(k);
  const int64_t span = S::kGroup ? S::kGroup / 4 : k / 4;
  const uint8_t* x = act_row(a.act, m, S::steps(k));
  I acc[R][2];
  F sum[R][2];
  for (int r = 0; r < R; ++r) {
    acc[r][0] = acc[r][1] = V::izero();
    sum[r][0] = sum[r][1] = V::zero();
  }
  int64_t l = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t end = min64(l + span, k / 4);
    lines.group(g);
    for (; l < end; l += kRun) {
      const uint8_t* xs = x + (l / 16) * kTile + (l % 16) * 4;
#pragma GCC unroll 4
      for (int64_t i = 0; i < kRun; ++i) {
        typename V::B w0, w1;
        lines.line(l + i, &w0, &w1);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          const I xv = V::iset1(load_i32(xs + r * kRowBytes + 4 * i));
          acc[r][0] = V::dot(acc[r][0], w0, xv);
          acc[r][1] = V::dot(acc[r][1], w1, xv);
        }
      }
    }
    if constexpr (S::kGroupScale) {
      for (int r = 0; r < R; ++r) {
        if (r >= valid) break;
        for (int h = 0; h < 2; ++h) {
          sum[r][h] = add_group<S, V>(a, m + r, b, g, groups, h, acc[r][h], sum[r][h]);
          acc[r][h] = V::izero();
        }
      }
    }
  }
  for (int r = 0; r < R; ++r) {
    if (r >= valid) break;
    if constexpr (S::kGroupScale) {
      finish_float<S, V>(a, epilogue, m + r, b, sum[r][0], sum[r][1]);
    } else {
      finish_int<S, V>(a, epilogue, m + r, b, acc[r][0], acc[r][1]);
    }
  }
}

/* All rows from m on: R at a time, and the tail with the smallest of R, R / 2, ... that covers it. Weights
 * go by once for the tail, and no group of rows crosses a tile. */
template <class S, class V, int R, class Lines>
KTC_INLINE void int_sweep(const ktc_gemm_args& a, int epilogue, const Lines& lines, int64_t k, int64_t m,
                          int64_t b) {
  for (; a.m_end - m > R / 2; m += R) {
    int_rows<S, V, R, Lines>(a, epilogue, lines, k, m, b, min64(R, a.m_end - m));
  }
  if constexpr (R > 1) int_sweep<S, V, R / 2, Lines>(a, epilogue, lines, k, m, b);
}

template <class S, class V>
KTC_NOINLINE void gemm_int(const ktc_gemm_args& a, int epilogue) {
  constexpr int R = S::kGroupScale ? V::kFloatRows : V::kIntRows;
  const int64_t k = S::k(a.k);
  const int64_t block_bytes = S::block_bytes(k);
  const uint8_t* const end = weights_end<S>(a, k);
  for (int64_t b = a.block_begin; b < a.block_end; ++b) {
    const uint8_t* tiles = a.weight.tiles + b * block_bytes;
    if constexpr (S::kFormat == KTC_INT8) {
      int_sweep<S, V, R>(a, epilogue, ByteLines<S, V>{tiles, end}, k, a.m_begin, b);
    } else {
      const uint8_t* mult = S::kMultiplier ? block_mult<S>(a, b, S::groups(k)) : nullptr;
      if (a.m_end - a.m_begin > R && k <= kMaxPanelK && a.scratch) {
        uint8_t* panel = static_cast<uint8_t*>(a.scratch);
        unpack_steps<S, V>(tiles, mult, 0, S::steps(k), panel);
        int_sweep<S, V, R>(a, epilogue, ByteLines<S, V>{panel, panel + S::steps(k) * 2 * kTile}, k, a.m_begin,
                           b);
      } else {
        int_sweep<S, V, R>(a, epilogue, NibbleLines<S, V>(tiles, end, mult), k, a.m_begin, b);
      }
    }
  }
}

}  // namespace ktc
#endif  // KTC_KERNELS_GEMM_INT_H
