/* Operands of gemm_wide.h: activations widened into scratch, lines of weights widened in registers, int4
 * panels. */
#ifndef KTC_KERNELS_WIDE_OPERANDS_H
#define KTC_KERNELS_WIDE_OPERANDS_H

#include "ktc/kernels/epilogue.h"
#include "ktc/kernels/unpack.h"

namespace ktc {

constexpr int64_t kWideStep = 2 * kRowBytes; /* one row of one step, widened: even k, then odd k */
constexpr int64_t kWideMaxK = 8192;          /* longer rows take the kernels that widen nothing */
constexpr int64_t kWideChunk = 4;            /* steps of one half before the other half follows: a window of
                                                call_ahead */
constexpr int64_t kWideSweep = 32;           /* steps that all rows sweep over before the next: 64 KB, so that
                                                these and the next ones stay in L2 whatever K is */

template <class S, class V>
constexpr bool is_wide() {
  return S::kFormat == KTC_BF16 ? V::kWideFloat : S::kInteger && !S::kGroupScale && V::kWideInt;
}

/* Of one step of `rows` rows: all rows of a step lie together, so that a group of them is one stream. An odd
 * number of lines, so that steps do not fall into the same cache sets. */
constexpr int64_t wide_step_bytes(int64_t rows) { return rows * kWideStep + kRowBytes; }
/* Rows widened at a time: as many as leave a block of weights room in L2. */
template <class S, class V>
constexpr int64_t wide_rows(int64_t k) {
  if (S::kFormat != KTC_BF16) return 64;
  constexpr int64_t kMost = 96;
  const int64_t fit =
      V::kWideFloatBytes / (k / S::kStepK * kWideStep) / V::kWideFloatRows * V::kWideFloatRows;
  return fit > kMost ? kMost : fit > V::kWideFloatLeast ? fit : V::kWideFloatLeast;
}
/* Rows of sums in registers. */
template <class S, class V>
constexpr int wide_sums() {
  return S::kFormat == KTC_BF16 ? V::kWideFloatRows : 4;
}

/* Fewer rows than this stream weights through the kernels that widen nothing. */
template <class S>
constexpr int64_t wide_min_rows() {
  return S::kFormat == KTC_BF16 ? 3 : S::kFormat == KTC_INT8 ? 4 : 1;
}
template <class S>
constexpr int64_t wide_panel_bytes() {
  return S::kFormat == KTC_INT4 ? kWideSweep * 2 * kTile : 0;
}
/* Of one row and block between two sweeps: both halves, bf16 even and odd k apart. */
template <class S>
constexpr int64_t wide_sum_bytes() {
  return (S::kFormat == KTC_BF16 ? 4 : 2) * kRowBytes;
}
template <class S, class V>
constexpr int64_t wide_scratch_bytes() {
  constexpr int64_t most = S::kK != 0 && S::kK < kWideMaxK ? S::kK : kWideMaxK;
  int64_t bytes = 0; /* shorter rows may be more */
  for (int64_t k = S::kK ? most : 64; k <= most; k += 64) {
    const int64_t rows = wide_rows<S, V>(k);
    const int64_t needed = rows * wide_sum_bytes<S>() + k / S::kStepK * wide_step_bytes(rows);
    if (needed > bytes) bytes = needed;
  }
  return wide_panel_bytes<S>() + bytes;
}

/* Rows [m, m + rows) of packed activations -> scratch. */
template <class S, class V>
KTC_INLINE void widen_rows(const ktc_gemm_args& a, int64_t k, int64_t m, int64_t rows, uint8_t* out) {
  const int64_t steps = S::steps(k), step = wide_step_bytes(rows);
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* x = act_row(a.act, m + r, steps);
    for (int64_t s = 0; s < steps; ++s) {
      V::template widen<S::kInteger>(x + s * kTile, out + s * step + r * kWideStep);
    }
  }
}

/* Weights that a sweep calls: its own, a window ahead, while they come from memory; those of the next sweep
 * once its own are in L2. */
template <class V, bool Next>
KTC_INLINE void call_lines(const uint8_t* p, const uint8_t* end) {
  if (Next) {
    V::prefetch_l2(p + kWideSweep * 2 * kTile);
    V::prefetch_l2(p + kWideSweep * 2 * kTile + kRowBytes);
  } else {
    call_ahead<V>(p, end);
  }
}

/* Lines (4 k) of int8 weights: `half` of 16 output rows of a step, then line i of its 16. */
template <class S, class V, bool Next>
struct WideBytes {
  using W = typename V::W;
  const uint8_t *tiles, *end;
  KTC_INLINE const uint8_t* half(int64_t s, int64_t h) const { return tiles + (2 * s + h) * kTile; }
  KTC_INLINE void call(const uint8_t* p, int64_t i) const { call_lines<V, Next>(p + i * kRowBytes, end); }
  static KTC_INLINE W line(const uint8_t* p, int64_t i) { return V::words(V::bload(p + i * kRowBytes)); }
};

/* Lines of int4 steps from `first` on that were unpacked to bytes; calls the nibbles that come after them. */
template <class S, class V>
struct WidePanel {
  using W = typename V::W;
  const uint8_t *panel, *next;
  int64_t first;
  KTC_INLINE const uint8_t* half(int64_t s, int64_t h) const { return panel + (2 * (s - first) + h) * kTile; }
  KTC_INLINE void call(const uint8_t* p, int64_t i) const {
    V::prefetch_l2(next + (p - panel + i * kRowBytes) / 2);
  }
  static KTC_INLINE W line(const uint8_t* p, int64_t i) { return V::words(V::bload(p + i * kRowBytes)); }
};

/* Groups of an int4 block: what turns its nibbles into signed 16-bit weights. */
template <class S, class V>
struct WideNibbles {
  using W = typename V::W;
  using Scale = typename V::template WideScale<S::kCodebook>;
  const uint8_t *tiles, *end, *mult;
  Scale scale[2];
  KTC_INLINE void group(int64_t g) {
    V::prefetch(mult + g * S::kMultBytes + kMultAhead);
    Scale::load(mult + g * S::kMultBytes, scale);
  }
  KTC_INLINE void line(int64_t l, W* w0, W* w1) const {
    const uint8_t* p = tiles + l * kRowBytes;
    if (l % 2 == 0) call_ahead<V>(p, end);
    typename V::B lo, hi;
    V::nibbles(V::bload(p), &lo, &hi);
    *w0 = scale[0].words(lo);
    *w1 = scale[1].words(hi);
  }
};

/* Steps [begin, end) of a block of int4 -> bytes around 128. */
template <class S, class V>
KTC_INLINE void fill_panel(const uint8_t* tiles, const uint8_t* weights, const uint8_t* mult, int64_t begin,
                           int64_t end, uint8_t* panel) {
  constexpr int64_t kRun = S::kRunK / 4;
  WideNibbles<S, V> nibbles{tiles, weights, mult, {}};
  for (int64_t l = 16 * begin; l < 16 * end; l += kRun) {
    nibbles.group(4 * l / S::kGroup);
    for (int64_t i = l; i < l + kRun; ++i) {
      typename V::W w[2];
      nibbles.line(i, &w[0], &w[1]);
      uint8_t* p = panel + (i / 16 - begin) * 2 * kTile + i % 16 * kRowBytes;
      V::bstore(p, V::bytes(w[0]));
      V::bstore(p + kTile, V::bytes(w[1]));
    }
  }
}

}  // namespace ktc
#endif  // KTC_KERNELS_WIDE_OPERANDS_H
