/* int8, int4 and bf16 GEMM for CPUs that must widen what they multiply: 16 vector registers, no byte dot
 * product.
 *
 * Activations are widened once per call into scratch, where one broadcast load gives an operand: pairs of
 * 16-bit integers (k and k + 2, k + 1 and k + 3 of a line), or fp32 values of even and odd k. Weights are
 * widened in registers; int4 under three or more rows is unpacked to a panel of bytes once per block.
 * Sixteen output rows at a time, so that R rows of sums stay in registers.
 *
 * Sums and their order are those of gemm_int.h and gemm_float.h: the same bits.
 */
#ifndef KTC_KERNELS_GEMM_WIDE_H
#define KTC_KERNELS_GEMM_WIDE_H

#include "ktc/kernels/epilogue.h"
#include "ktc/kernels/unpack.h"

namespace ktc {

constexpr int64_t kWideStep = 2 * kRowBytes; /* one row of one step, widened: even k, then odd k */
constexpr int64_t kWideMaxK = 8192;          /* longer rows take the kernels that widen nothing */
constexpr int64_t kWideChunk = 4;            /* steps of one half before the other half follows: a window of
                                                prefetch_pages */

template <class S, class V>
constexpr bool is_wide() {
  return S::kFormat == KTC_BF16 ? V::kWideFloat : S::kInteger && !S::kGroupScale && V::kWideInt;
}

/* Rows widened at a time: as many as leave a block of weights room in L2. */
template <class S>
constexpr int64_t wide_rows() {
  return S::kFormat == KTC_BF16 ? 24 : 64;
}
/* Rows of sums in registers. */
template <class S>
constexpr int wide_sums() {
  return S::kFormat == KTC_BF16 ? 3 : 4;
}

/* An odd number of lines, so that the rows of a group never fall into the same cache sets. */
template <class S>
constexpr int64_t wide_row_bytes(int64_t k) {
  return k / S::kStepK * kWideStep + kRowBytes;
}
/* Fewer rows than this stream weights through the kernels that widen nothing. */
template <class S>
constexpr int64_t wide_min_rows() {
  return S::kFormat == KTC_BF16 ? 3 : S::kFormat == KTC_INT8 ? 4 : 1;
}
template <class S>
constexpr int64_t wide_panel_bytes(int64_t k) {
  return S::kFormat == KTC_INT4 ? kBlockRows * k : 0;
}
template <class S>
constexpr int64_t wide_scratch_bytes() {
  constexpr int64_t k = S::kK != 0 && S::kK < kWideMaxK ? S::kK : kWideMaxK;
  return wide_panel_bytes<S>(k) + wide_rows<S>() * wide_row_bytes<S>(k);
}

/* Rows [m, m + rows) of packed activations -> scratch. */
template <class S, class V>
KTC_INLINE void widen_rows(const ktc_gemm_args& a, int64_t k, int64_t m, int64_t rows, uint8_t* out) {
  const int64_t steps = S::steps(k), stride = wide_row_bytes<S>(k);
  for (int64_t r = 0; r < rows; ++r) {
    const uint8_t* x = act_row(a.act, m + r, steps);
    for (int64_t s = 0; s < steps; ++s) {
      V::template widen<S::kInteger>(x + s * kTile, out + r * stride + s * kWideStep);
    }
  }
}

/* Weights that a sweep calls: its own, a window ahead, while they come from memory; those of the next block
 * once its own are in L2. */
template <class V, bool Next>
KTC_INLINE void call_lines(const uint8_t* p, int64_t block_bytes) {
  if (Next) {
    V::prefetch_l2(p + block_bytes);
    V::prefetch_l2(p + block_bytes + kRowBytes);
  } else {
    prefetch_pages<V>(p);
  }
}

/* Lines (4 k) of int8 weights: `half` of 16 output rows of a step, then line i of its 16. */
template <class S, class V, bool Next>
struct WideBytes {
  using W = typename V::W;
  const uint8_t* tiles;
  int64_t block_bytes;
  KTC_INLINE const uint8_t* half(int64_t s, int64_t h) const { return tiles + (2 * s + h) * kTile; }
  KTC_INLINE void call(const uint8_t* p, int64_t i) const {
    call_lines<V, Next>(p + i * kRowBytes, block_bytes);
  }
  static KTC_INLINE W line(const uint8_t* p, int64_t i) { return V::words(V::bload(p + i * kRowBytes)); }
};

/* Lines of an int4 block that was unpacked to bytes; calls the nibbles of the block after it. */
template <class S, class V>
struct WidePanel {
  using W = typename V::W;
  const uint8_t *panel, *next;
  KTC_INLINE const uint8_t* half(int64_t s, int64_t h) const { return panel + (2 * s + h) * kTile; }
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
  const uint8_t *tiles, *mult;
  Scale scale[2];
  KTC_INLINE void group(int64_t g) { Scale::load(mult + g * S::kMultBytes, scale); }
  KTC_INLINE void line(int64_t l, W* w0, W* w1) const {
    const uint8_t* p = tiles + l * kRowBytes;
    if (l % 2 == 0) prefetch_pages<V>(p);
    typename V::B lo, hi;
    V::nibbles(V::bload(p), &lo, &hi);
    *w0 = scale[0].words(lo);
    *w1 = scale[1].words(hi);
  }
};

template <class S, class V>
KTC_INLINE void fill_panel(const uint8_t* tiles, const uint8_t* mult, int64_t k, uint8_t* panel) {
  constexpr int64_t kRun = S::kRunK / 4;
  WideNibbles<S, V> nibbles{tiles, mult, {}};
  for (int64_t l = 0; l < k / 4; l += kRun) {
    nibbles.group(4 * l / S::kGroup);
    for (int64_t i = l; i < l + kRun; ++i) {
      typename V::W w[2];
      nibbles.line(i, &w[0], &w[1]);
      uint8_t* p = panel + i / 16 * 2 * kTile + i % 16 * kRowBytes;
      V::bstore(p, V::bytes(w[0]));
      V::bstore(p + kTile, V::bytes(w[1]));
    }
  }
}

/* acc[r] += one operand of weights times that of row r. */
template <class V, int R>
KTC_INLINE void wide_madd(typename V::I (&acc)[R], const typename V::I& w, const uint8_t* x, int64_t stride) {
  _Pragma("GCC unroll 8") for (int r = 0; r < R; ++r) {
    acc[r] = V::madd(acc[r], w, V::iset1(load_i32(x + r * stride)));
    V::settle(&acc[r]);
  }
}
template <class V, int R>
KTC_INLINE void wide_fma(typename V::F (&acc)[R], const typename V::F& w, const uint8_t* x, int64_t stride) {
  _Pragma("GCC unroll 8") for (int r = 0; r < R; ++r) {
    acc[r] = V::fma_exact(w, V::from_bits(V::iset1(load_i32(x + r * stride))), acc[r]);
    V::settle(&acc[r]);
  }
}

template <class V, int R>
KTC_INLINE void wide_line(typename V::I (&acc)[R], const typename V::W& w, const uint8_t* x, int64_t stride) {
  wide_madd<V, R>(acc, w.even, x, stride);
  wide_madd<V, R>(acc, w.odd, x + kRowBytes, stride);
}

/* R rows from m on against block b; x: their widened activations. */
template <class S, class V, int R, class Lines>
KTC_NOINLINE void wide_int_rows(const ktc_gemm_args& a, int epilogue, Lines lines, int64_t k,
                                const uint8_t* x, int64_t m, int64_t b) {
  using I = typename V::I;
  const int64_t steps = S::steps(k), stride = wide_row_bytes<S>(k);
  I sums[2][R];
  for (int r = 0; r < R; ++r) sums[0][r] = sums[1][r] = V::izero();
  for (int64_t chunk = 0; chunk < steps; chunk += kWideChunk) {
    const int64_t end = min64(chunk + kWideChunk, steps);
    for (int h = 0; h < 2; ++h) {
      I acc[R];
      for (int r = 0; r < R; ++r) acc[r] = sums[h][r];
      for (int64_t s = chunk; s < end; ++s) {
        const uint8_t *xs = x + s * kWideStep, *w = lines.half(s, h);
        for (int64_t i = 0; i < 16; i += 2) {
          lines.call(w, i);
          wide_line<V, R>(acc, Lines::line(w, i), xs + 4 * i, stride);
          wide_line<V, R>(acc, Lines::line(w, i + 1), xs + 4 * i + 4, stride);
        }
      }
      for (int r = 0; r < R; ++r) sums[h][r] = acc[r];
    }
  }
  for (int r = 0; r < R; ++r) finish_int<S, V>(a, epilogue, m + r, b, sums[0][r], sums[1][r]);
}

/* One or two rows straight from the nibbles: every line is read once, for both halves. */
template <class S, class V, int R>
KTC_NOINLINE void wide_nibble_rows(const ktc_gemm_args& a, int epilogue, const uint8_t* tiles,
                                   const uint8_t* mult, int64_t k, const uint8_t* x, int64_t m, int64_t b) {
  using I = typename V::I;
  constexpr int64_t kRun = S::kRunK / 4;
  const int64_t stride = wide_row_bytes<S>(k);
  const int64_t span = S::kGroup / 4;
  WideNibbles<S, V> nibbles{tiles, mult, {}};
  I acc[2][R];
  /* Signed weights: what bytes around 128 would have added is there from the start. */
  for (int r = 0; r < R; ++r) acc[0][r] = acc[1][r] = V::iset1(S::kOffset * a.act.sums[m + r]);
  int64_t l = 0;
  for (int64_t g = 0; l < k / 4; ++g) {
    nibbles.group(g);
    for (const int64_t end = min64(l + span, k / 4); l < end; l += kRun) {
      const uint8_t* xs = x + l / 16 * kWideStep + l % 16 * 4;
      _Pragma("GCC unroll 4") for (int64_t i = 0; i < kRun; ++i) {
        typename V::W w0, w1;
        nibbles.line(l + i, &w0, &w1);
        wide_line<V, R>(acc[0], w0, xs + 4 * i, stride);
        wide_line<V, R>(acc[1], w1, xs + 4 * i, stride);
      }
    }
  }
  for (int r = 0; r < R; ++r) finish_int<S, V>(a, epilogue, m + r, b, acc[0][r], acc[1][r]);
}

/* R rows of bf16: even and odd k have a sum each, as in gemm_float.h. */
template <class S, class V, int R, bool Next>
KTC_NOINLINE void wide_bf16_rows(const ktc_gemm_args& a, int epilogue, const uint8_t* tiles, int64_t k,
                                 const uint8_t* x, int64_t m, int64_t b) {
  using F = typename V::F;
  const int64_t steps = S::steps(k), stride = wide_row_bytes<S>(k);
  F sums[2][R][2];
  for (int h = 0; h < 2; ++h) {
    for (int r = 0; r < R; ++r) sums[h][r][0] = sums[h][r][1] = V::zero();
  }
  for (int64_t chunk = 0; chunk < steps; chunk += kWideChunk) {
    const int64_t end = min64(chunk + kWideChunk, steps);
    for (int h = 0; h < 2; ++h) {
      F even[R], odd[R];
      for (int r = 0; r < R; ++r) even[r] = sums[h][r][0], odd[r] = sums[h][r][1];
      for (int64_t s = chunk; s < end; ++s) {
        const uint8_t* w = tiles + s * 2 * kTile + h * kTile;
        const uint8_t* xs = x + s * kWideStep;
        _Pragma("GCC unroll 2") for (int64_t i = 0; i < 16; ++i) {
          if (i % 2 == 0) call_lines<V, Next>(w + i * kRowBytes, S::block_bytes(k));
          const typename V::B line = V::bload(w + i * kRowBytes);
          wide_fma<V, R>(even, V::bf16_even(line), xs + 4 * i, stride);
          wide_fma<V, R>(odd, V::bf16_odd(line), xs + kRowBytes + 4 * i, stride);
        }
      }
      for (int r = 0; r < R; ++r) sums[h][r][0] = even[r], sums[h][r][1] = odd[r];
    }
  }
  for (int r = 0; r < R; ++r) {
    finish_float<S, V>(a, epilogue, m + r, b, V::add(sums[0][r][0], sums[0][r][1]),
                       V::add(sums[1][r][0], sums[1][r][1]));
  }
}

/* `rows` widened rows from m on against block b: R at a time, the tail with fewer. */
template <class S, class V, int R, bool Next>
KTC_INLINE void wide_sweep(const ktc_gemm_args& a, int epilogue, int64_t k, const uint8_t* x, int64_t m,
                           int64_t rows, int64_t b, const uint8_t* panel) {
  const int64_t block_bytes = S::block_bytes(k);
  const uint8_t* tiles = a.weight.tiles + b * block_bytes;
  for (; rows >= R; rows -= R, m += R, x += R * wide_row_bytes<S>(k)) {
    if constexpr (S::kFormat == KTC_BF16) {
      wide_bf16_rows<S, V, R, Next>(a, epilogue, tiles, k, x, m, b);
    } else if constexpr (S::kFormat == KTC_INT8) {
      wide_int_rows<S, V, R>(a, epilogue, WideBytes<S, V, Next>{tiles, block_bytes}, k, x, m, b);
    } else {
      /* A panel is the same whatever it was made of. */
      using Bytes = Spec<KTC_INT8, KTC_SCALE_CHANNEL, 0, 0>;
      wide_int_rows<Bytes, V, R>(a, epilogue, WidePanel<Bytes, V>{panel, tiles + block_bytes}, k, x, m, b);
    }
    if constexpr (!Next) {
      if (rows -= R)
        wide_sweep<S, V, R, true>(a, epilogue, k, x + R * wide_row_bytes<S>(k), m + R, rows, b, panel);
      return;
    }
  }
  if constexpr (R > 1) wide_sweep<S, V, R - 1, Next>(a, epilogue, k, x, m, rows, b, panel);
}

template <class S, class V>
KTC_NOINLINE void gemm_wide(const ktc_gemm_args& a, int epilogue) {
  const int64_t k = S::k(a.k);
  uint8_t* const panel = static_cast<uint8_t*>(a.scratch);
  uint8_t* const x = panel + wide_panel_bytes<S>(k);
  for (int64_t m = a.m_begin; m < a.m_end; m += wide_rows<S>()) {
    const int64_t rows = min64(wide_rows<S>(), a.m_end - m);
    widen_rows<S, V>(a, k, m, rows, x);
    for (int64_t b = a.block_begin; b < a.block_end; ++b) {
      if constexpr (S::kFormat == KTC_INT4) {
        const uint8_t *tiles = a.weight.tiles + b * S::block_bytes(k),
                      *mult = block_mult<S>(a, b, S::groups(k));
        if (rows == 1) {
          wide_nibble_rows<S, V, 1>(a, epilogue, tiles, mult, k, x, m, b);
          continue;
        }
        if (rows == 2) {
          wide_nibble_rows<S, V, 2>(a, epilogue, tiles, mult, k, x, m, b);
          continue;
        }
        fill_panel<S, V>(tiles, mult, k, panel);
      }
      /* A panel is in L2 from the start. */
      wide_sweep<S, V, wide_sums<S>(), S::kFormat == KTC_INT4>(a, epilogue, k, x, m, rows, b, panel);
    }
  }
}

}  // namespace ktc
#endif  // KTC_KERNELS_GEMM_WIDE_H
