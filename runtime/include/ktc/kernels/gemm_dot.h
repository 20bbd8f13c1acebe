/* GEMM on vectors by dot products of bytes (int8, int4) or bf16 pairs: few rows of activations, weights
 * streamed once.
 *
 * R rows of activations stay in R x 2 registers of sums while the lines of a 32-row block go by; a line
 * (4 k x 32 rows, of bf16 2 k) is loaded, unpacked if need be, and multiplied with 4 broadcast activation
 * bytes per row. With more rows than registers, int4 blocks are unpacked once into scratch.
 */
#ifndef KTC_KERNELS_GEMM_DOT_H
#define KTC_KERNELS_GEMM_DOT_H

#include "ktc/kernels/epilogue.h"
#include "ktc/kernels/unpack.h"

namespace ktc {

constexpr int64_t kMaxPanelK = 8192; /* longer rows are unpacked again for each group of rows */

template <class S>
constexpr int64_t vector_scratch_bytes() {
  if (S::kFormat != KTC_INT4) return 0;
  return kBlockRows * (S::kK != 0 && S::kK < kMaxPanelK ? S::kK : kMaxPanelK);
}

/* Whether these kernels are for a format. */
template <class S, class V>
constexpr bool is_dot() {
  return S::kInteger || (S::kFormat == KTC_BF16 && V::kDotFloat);
}
/* What products are summed in: int32 or fp32. */
template <class S, class V>
using DotSum = std::conditional_t<S::kInteger, typename V::I, typename V::F>;

/* The end of a row whose sums have no scales yet but those of the whole row. */
template <class S, class V>
KTC_INLINE void finish_dot(const ktc_gemm_args& a, int epilogue, int64_t m, int64_t b, const DotSum<S, V>& y0,
                           const DotSum<S, V>& y1) {
  if constexpr (S::kInteger) {
    finish_int<S, V>(a, epilogue, m, b, y0, y1);
  } else {
    finish_float<S, V>(a, epilogue, m, b, y0, y1);
  }
}

/* Rows of one pass over the weights, if there are more than `kIntRows` and no more than these. */
template <class S, class V>
constexpr int most_dot_rows() {
  return S::kGroupScale ? V::kFloatRows : V::kMostIntRows;
}

/* acc[r] += the products of a run of N lines from line l on with row r; x: the first row's bytes. */
template <class V, int R, int64_t N, class A, class Lines>
KTC_INLINE void dot_lines(A (&acc)[R][2], const Lines& lines, int64_t l, const uint8_t* x) {
  const auto run = lines.at(l);
  for (int64_t first = 0; first < N; first += 4) {
#pragma GCC unroll 4
    for (int64_t i = first; i < first + 4; ++i) {
      typename V::B w0, w1;
      lines.line(run, i, &w0, &w1);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const typename V::I xv = V::iset1(load_i32(x + r * kRowBytes + 4 * i));
        acc[r][0] = V::dot(acc[r][0], w0, xv);
        acc[r][1] = V::dot(acc[r][1], w1, xv);
      }
    }
  }
}

/* Rows m..m+R of the activations against block b; the last R - valid of them are computed (they lie in
 * the same tile) but neither scaled nor written. Never inlined: each R has the registers for itself. */
template <class S, class V, int R, class Lines>
KTC_NOINLINE void dot_rows(const ktc_gemm_args& a, int epilogue, Lines lines, int64_t k, int64_t m, int64_t b,
                           int64_t valid) {
  using F = typename V::F;
  constexpr int64_t kRun = S::kRunK / S::kLineK < 16 ? S::kRunK / S::kLineK : 16; /* lines */
  const int64_t groups = S::groups(k), count = k / S::kLineK;
  const int64_t span = S::kGroup ? S::kGroup / S::kLineK : count;
  const uint8_t* x = act_row(a.act, m, S::steps(k));
  DotSum<S, V> acc[R][2];
  F sum[R][2];
  for (int r = 0; r < R; ++r) {
    acc[r][0] = acc[r][1] = DotSum<S, V>{};
    sum[r][0] = sum[r][1] = V::zero();
  }
  int64_t l = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t end = min64(l + span, count);
    lines.group(g);
    for (; l < end; l += kRun) dot_lines<V, R, kRun>(acc, lines, l, x + (l / 16) * kTile + (l % 16) * 4);
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
      finish_dot<S, V>(a, epilogue, m + r, b, acc[r][0], acc[r][1]);
    }
  }
}

/* All rows from m on: R at a time, and the tail with the smallest of R, R / 2, ... that covers it. Weights
 * go by once for the tail, and no group of rows crosses a tile. */
template <class S, class V, int R, class Lines>
KTC_INLINE void dot_sweep(const ktc_gemm_args& a, int epilogue, const Lines& lines, int64_t k, int64_t m,
                          int64_t b) {
  for (; a.m_end - m > R / 2; m += R) {
    dot_rows<S, V, R, Lines>(a, epilogue, lines, k, m, b, min64(R, a.m_end - m));
  }
  if constexpr (R > 1) dot_sweep<S, V, R / 2, Lines>(a, epilogue, lines, k, m, b);
}

/* All rows of a call against one block. Up to `most_dot_rows` go by in one pass, of which there is one for
 * every second count: rows that are computed in vain cost as much as others. */
template <class S, class V, class Lines>
KTC_INLINE void dot_block(const ktc_gemm_args& a, int epilogue, const Lines& lines, int64_t k, int64_t b) {
  constexpr int R = S::kGroupScale ? V::kFloatRows : V::kIntRows, kMost = most_dot_rows<S, V>();
  const int64_t rows = a.m_end - a.m_begin;
  if constexpr (kMost > R) {
    static_assert(kMost - 2 > R, "a size between");
    if (rows > kMost - 2 && rows <= kMost)
      return dot_rows<S, V, kMost, Lines>(a, epilogue, lines, k, a.m_begin, b, rows);
    if (rows > R && rows <= kMost - 2)
      return dot_rows<S, V, kMost - 2, Lines>(a, epilogue, lines, k, a.m_begin, b, rows);
    if (rows > R / 2 && rows <= R - 2)
      return dot_rows<S, V, R - 2, Lines>(a, epilogue, lines, k, a.m_begin, b, rows);
  }
  dot_sweep<S, V, R>(a, epilogue, lines, k, a.m_begin, b);
}

/* The scales of a block, a stream too slow to be foreseen by the CPU. */
template <class V>
KTC_INLINE void call_scales(const ktc_gemm_args& a, int64_t b) {
  const float* const scale = a.weight.scale + b * kBlockRows;
  V::prefetch(reinterpret_cast<const uint8_t*>(scale));
  V::prefetch(reinterpret_cast<const uint8_t*>(scale + kBlockRows / 2));
}

template <class S, class V>
KTC_NOINLINE void gemm_dot(const ktc_gemm_args& a, int epilogue) {
  const int64_t k = S::k(a.k);
  const int64_t block_bytes = S::block_bytes(k);
  const uint8_t* const end = weights_end<S>(a, k);
  if constexpr (S::kInteger && !S::kGroupScale) call_scales<V>(a, a.block_begin);
  for (int64_t b = a.block_begin; b < a.block_end; ++b) {
    if constexpr (S::kInteger && !S::kGroupScale) call_scales<V>(a, b + 1);
    const uint8_t* tiles = a.weight.tiles + b * block_bytes;
    if constexpr (S::kFormat != KTC_INT4) {
      dot_block<S, V>(a, epilogue, ByteLines<S, V>{tiles, end}, k, b);
    } else {
      const uint8_t* mult = S::kMultiplier ? block_mult<S>(a, b, S::groups(k)) : nullptr;
      if (a.m_end - a.m_begin > most_dot_rows<S, V>() && k <= kMaxPanelK && a.scratch) {
        uint8_t* panel = static_cast<uint8_t*>(a.scratch);
        unpack_steps<S, V>(tiles, mult, 0, S::steps(k), panel);
        dot_block<S, V>(a, epilogue, ByteLines<S, V>{panel, panel + S::steps(k) * 2 * kTile}, k, b);
      } else {
        dot_block<S, V>(a, epilogue, NibbleLines<S, V>(tiles, end, mult), k, b);
      }
    }
  }
}

}  // namespace ktc
#endif  // KTC_KERNELS_GEMM_DOT_H
