/* int8, int4 and bf16 GEMM for CPUs that must widen what they multiply: 16 vector registers, no byte dot
 * product.
 *
 * Activations are widened once per call into scratch, where one broadcast load gives an operand: pairs of
 * 16-bit integers (k and k + 2, k + 1 and k + 3 of a line), or fp32 values of even and odd k. Weights are
 * widened in registers; int4 under three or more rows is unpacked to a panel of bytes once per block.
 * Sixteen output rows at a time, so that R rows of sums stay in registers.
 *
 * Sums and their order are those of gemm_dot.h and gemm_float.h: the same bits.
 */
#ifndef KTC_KERNELS_GEMM_WIDE_H
#define KTC_KERNELS_GEMM_WIDE_H

#include "ktc/kernels/wide_operands.h"

namespace ktc {

/* What all rows sweep over next: steps [begin, end) of block b. */
struct WideSweep {
  int64_t b, begin, end;
  bool last; /* of the block: rows end here */
};

/* acc[r] += one operand of weights times that of row r. */
template <class V, int R>
KTC_INLINE void wide_madd(typename V::I (&acc)[R], const typename V::I& w, const uint8_t* x) {
  _Pragma("GCC unroll 12") for (int r = 0; r < R; ++r) {
    acc[r] = V::madd(acc[r], w, V::iset1(load_i32(x + r * kWideStep)));
    V::settle(&acc[r]);
  }
}
/* acc[h][r] += the operand of each half times that of row r. */
template <class V, int R, int H>
KTC_INLINE void wide_fma(typename V::F (&acc)[H][R], const typename V::F (&w)[H], const uint8_t* x) {
  _Pragma("GCC unroll 12") for (int r = 0; r < R; ++r) {
    const typename V::F xv = V::from_bits(V::iset1(load_i32(x + r * kWideStep)));
    for (int h = 0; h < H; ++h) {
      acc[h][r] = V::fma_exact(w[h], xv, acc[h][r]);
      V::settle(&acc[h][r]);
    }
  }
}

template <class V, int R>
KTC_INLINE void wide_line(typename V::I (&acc)[R], const typename V::W& w, const uint8_t* x) {
  wide_madd<V, R>(acc, w.even, x);
  wide_madd<V, R>(acc, w.odd, x + kRowBytes);
}

/* R rows from m on over one sweep; x: their widened activations, `step` bytes from one step to the next,
 * sums: [R][2] between sweeps. */
template <class S, class V, int R, class Lines>
KTC_NOINLINE void wide_int_rows(const ktc_gemm_args& a, int epilogue, Lines lines, const WideSweep& sweep,
                                const uint8_t* x, int64_t step, typename V::I* sums, int64_t m) {
  using I = typename V::I;
  if (sweep.begin == 0) {
    for (int r = 0; r < 2 * R; ++r) sums[r] = V::izero();
  }
  for (int64_t chunk = sweep.begin; chunk < sweep.end; chunk += kWideChunk) {
    const int64_t end = min64(chunk + kWideChunk, sweep.end);
    for (int h = 0; h < 2; ++h) {
      I acc[R];
      for (int r = 0; r < R; ++r) acc[r] = sums[2 * r + h];
      for (int64_t s = chunk; s < end; ++s) {
        const uint8_t *xs = x + s * step, *w = lines.half(s, h);
        for (int64_t i = 0; i < 16; i += 2) {
          lines.call(w, i);
          wide_line<V, R>(acc, Lines::line(w, i), xs + 4 * i);
          wide_line<V, R>(acc, Lines::line(w, i + 1), xs + 4 * i + 4);
        }
      }
      for (int r = 0; r < R; ++r) sums[2 * r + h] = acc[r];
    }
  }
  if (!sweep.last) return;
  for (int r = 0; r < R; ++r) finish_int<S, V>(a, epilogue, m + r, sweep.b, sums[2 * r], sums[2 * r + 1]);
}

/* One or two rows straight from the nibbles: every line is read once, for both halves. */
template <class S, class V, int R>
KTC_NOINLINE void wide_nibble_rows(const ktc_gemm_args& a, int epilogue, const uint8_t* tiles,
                                   const uint8_t* mult, int64_t k, const uint8_t* x, int64_t step, int64_t m,
                                   int64_t b) {
  using I = typename V::I;
  constexpr int64_t kRun = S::kRunK / 4;
  const int64_t span = S::kGroup / 4;
  WideNibbles<S, V> nibbles{tiles, weights_end<S>(a, k), mult, {}};
  I acc[2][R];
  /* Signed weights: what bytes around 128 would have added is there from the start. */
  for (int r = 0; r < R; ++r) acc[0][r] = acc[1][r] = V::iset1(S::kOffset * a.act.sums[m + r]);
  int64_t l = 0;
  for (int64_t g = 0; l < k / 4; ++g) {
    nibbles.group(g);
    for (const int64_t end = min64(l + span, k / 4); l < end; l += kRun) {
      const uint8_t* xs = x + l / 16 * step + l % 16 * 4;
      _Pragma("GCC unroll 4") for (int64_t i = 0; i < kRun; ++i) {
        typename V::W w0, w1;
        nibbles.line(l + i, &w0, &w1);
        wide_line<V, R>(acc[0], w0, xs + 4 * i);
        wide_line<V, R>(acc[1], w1, xs + 4 * i);
      }
    }
  }
  for (int r = 0; r < R; ++r) finish_int<S, V>(a, epilogue, m + r, b, acc[0][r], acc[1][r]);
}

/* R rows of bf16: even and odd k have a sum each, as in gemm_float.h. sums: [R][2][even, odd]. */
template <class S, class V, int R, bool Next>
KTC_NOINLINE void wide_bf16_rows(const ktc_gemm_args& a, int epilogue, const uint8_t* tiles,
                                 const WideSweep& sweep, const uint8_t* x, int64_t step, typename V::F* sums,
                                 int64_t m) {
  using F = typename V::F;
  constexpr int H = R <= V::kWideBothHalves ? 2 : 1;
  const uint8_t* const weights = weights_end<S>(a, S::k(a.k));
  if (sweep.begin == 0) {
    for (int r = 0; r < 4 * R; ++r) sums[r] = V::zero();
  }
  /* Both halves at once need no turns between them. */
  const int64_t turn = H == 2 ? sweep.end - sweep.begin : kWideChunk;
  for (int64_t chunk = sweep.begin; chunk < sweep.end; chunk += turn) {
    const int64_t end = min64(chunk + turn, sweep.end);
    for (int64_t first = 0; first < 2; first += H) {
      F even[H][R], odd[H][R];
      for (int h = 0; h < H; ++h) {
        const F* const from = sums + 2 * (first + h);
        for (int r = 0; r < R; ++r) even[h][r] = from[4 * r], odd[h][r] = from[4 * r + 1];
      }
      for (int64_t s = chunk; s < end; ++s) {
        const uint8_t *xs = x + s * step, *w = tiles + s * 2 * kTile + first * kTile;
        _Pragma("GCC unroll 2") for (int64_t i = 0; i < 16; ++i) {
          F we[H], wo[H];
          for (int h = 0; h < H; ++h) {
            const uint8_t* const p = w + h * kTile + i * kRowBytes;
            if (i % 2 == 0) call_lines<V, Next>(p, weights);
            const typename V::B line = V::bload(p);
            we[h] = V::bf16_even(line);
            wo[h] = V::bf16_odd(line);
          }
          wide_fma<V, R, H>(even, we, xs + 4 * i);
          wide_fma<V, R, H>(odd, wo, xs + kRowBytes + 4 * i);
        }
      }
      for (int h = 0; h < H; ++h) {
        F* const to = sums + 2 * (first + h);
        for (int r = 0; r < R; ++r) to[4 * r] = even[h][r], to[4 * r + 1] = odd[h][r];
      }
    }
  }
  if (!sweep.last) return;
  for (int r = 0; r < R; ++r) {
    const F* const y = sums + 4 * r;
    finish_float<S, V>(a, epilogue, m + r, sweep.b, V::add(y[0], y[1]), V::add(y[2], y[3]));
  }
}

/* `rows` widened rows from m on over one sweep, in `groups` of R rows or fewer: all about equal, since a
 * group of one row costs half of one of six. */
template <class S, class V, int R, bool Next>
KTC_INLINE void wide_sweep(const ktc_gemm_args& a, int epilogue, const WideSweep& sweep, const uint8_t* tiles,
                           const uint8_t* x, int64_t step, uint8_t* sums, int64_t m, int64_t rows,
                           int64_t groups, const uint8_t* panel) {
  while (rows > groups * (R - 1)) {
    if constexpr (S::kFormat == KTC_BF16) {
      wide_bf16_rows<S, V, R, Next>(a, epilogue, tiles, sweep, x, step,
                                    reinterpret_cast<typename V::F*>(sums), m);
    } else if constexpr (S::kFormat == KTC_INT8) {
      wide_int_rows<S, V, R>(a, epilogue, WideBytes<S, V, Next>{tiles, weights_end<S>(a, S::k(a.k))}, sweep,
                             x, step, reinterpret_cast<typename V::I*>(sums), m);
    } else {
      /* A panel is the same whatever it was made of. */
      using Bytes = Spec<KTC_INT8, KTC_SCALE_CHANNEL, 0, 0>;
      wide_int_rows<Bytes, V, R>(a, epilogue,
                                 WidePanel<Bytes, V>{panel, tiles + sweep.end * kTile, sweep.begin}, sweep, x,
                                 step, reinterpret_cast<typename V::I*>(sums), m);
    }
    rows -= R, --groups, m += R, x += R * kWideStep, sums += R * wide_sum_bytes<S>();
    if constexpr (!Next) {
      if (rows > 0)
        wide_sweep<S, V, R, true>(a, epilogue, sweep, tiles, x, step, sums, m, rows, groups, panel);
      return;
    }
  }
  if constexpr (R > 1)
    wide_sweep<S, V, R - 1, Next>(a, epilogue, sweep, tiles, x, step, sums, m, rows, groups, panel);
}

template <class S, class V>
KTC_NOINLINE void gemm_wide(const ktc_gemm_args& a, int epilogue) {
  const int64_t k = S::k(a.k), steps = S::steps(k);
  uint8_t* const panel = static_cast<uint8_t*>(a.scratch);
  uint8_t* const sums = panel + wide_panel_bytes<S>();
  const int64_t at_once = wide_rows<S, V>(k);
  uint8_t* const x = sums + at_once * wide_sum_bytes<S>();
  for (int64_t m = a.m_begin; m < a.m_end; m += at_once) {
    const int64_t rows = min64(at_once, a.m_end - m);
    const int64_t step = wide_step_bytes(rows);
    widen_rows<S, V>(a, k, m, rows, x);
    for (int64_t b = a.block_begin; b < a.block_end; ++b) {
      const uint8_t* const tiles = a.weight.tiles + b * S::block_bytes(k);
      const uint8_t* const mult = S::kMultiplier ? block_mult<S>(a, b, S::groups(k)) : nullptr;
      if constexpr (S::kFormat == KTC_INT4) {
        if (rows == 1) {
          wide_nibble_rows<S, V, 1>(a, epilogue, tiles, mult, k, x, step, m, b);
          continue;
        }
        if (rows == 2) {
          wide_nibble_rows<S, V, 2>(a, epilogue, tiles, mult, k, x, step, m, b);
          continue;
        }
      }
      for (int64_t s = 0; s < steps; s += kWideSweep) {
        const WideSweep sweep{b, s, min64(s + kWideSweep, steps), s + kWideSweep >= steps};
        if constexpr (S::kFormat == KTC_INT4) {
          fill_panel<S, V>(tiles, weights_end<S>(a, k), mult, s, sweep.end, panel);
        }
        /* A panel is in L2 from the start. */
        wide_sweep<S, V, wide_sums<S, V>(), S::kFormat == KTC_INT4>(
            a, epilogue, sweep, tiles, x, step, sums, m, rows, ceil_div(rows, wide_sums<S, V>()), panel);
      }
    }
  }
}

}  // namespace ktc
#endif  // KTC_KERNELS_GEMM_WIDE_H
