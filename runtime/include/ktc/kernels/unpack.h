/* int4 tiles -> byte tiles ("panel"): unpacked once, then every row of activations sweeps over it.
 *
 * A panel has the layout of int8 tiles: steps x 2 x 1 KB. With multipliers a byte is
 * nibble * mult + (128 - 8 * mult) = mult * q + 128, with the codebook level + 128; under fp32 group scales
 * it is the raw nibble q + 8.
 */
#ifndef KTC_KERNELS_UNPACK_H
#define KTC_KERNELS_UNPACK_H

#include <type_traits>

#include "ktc/kernels/common.h"

namespace ktc {

/* Multipliers are a second stream beside the nibbles, and called as far ahead: without it a one-token call
 * takes 7% longer. */
constexpr int64_t kMultAhead = 1024;

/* One source of weight lines for the vector kernels. A line is 4 k (of bf16: 2 k) of the 32 rows of a block;
 * lines are read in runs that cross neither a step nor a group: `at` says where the run begins that line l
 * of the block begins, `line` reads its i-th. */
template <class S, class V>
struct ByteLines {
  const uint8_t *tiles, *end;
  struct Run {
    const uint8_t *lines, *in_order; /* in_order: as many bytes on as have been used */
  };
  KTC_INLINE void group(int64_t) {}
  KTC_INLINE Run at(int64_t l) const {
    return Run{tiles + (l / 16) * 2 * kTile + (l % 16) * kRowBytes, tiles + 2 * l * kRowBytes};
  }
  KTC_INLINE void line(const Run& run, int64_t i, typename V::B* w0, typename V::B* w1) const {
    const uint8_t* p = run.lines + i * kRowBytes;
    call_ahead<V>(run.in_order + 2 * i * kRowBytes, end);
    *w0 = V::bload(p);
    *w1 = V::bload(p + kTile);
  }
};

/* Straight from the nibbles: each line is unpacked as it is used. Called: the weights are in L2 already. */
template <class S, class V, bool Called = false>
struct NibbleLines {
  const uint8_t *tiles, *end; /* of this block, and of the weights of this call */
  const uint8_t* mult;        /* of this block: [groups][kMultBytes] */
  std::conditional_t<S::kCodebook, typename V::Select, typename V::Mult> m0, m1;
  KTC_INLINE NibbleLines(const uint8_t* tiles_, const uint8_t* end_, const uint8_t* mult_)
      : tiles(tiles_), end(end_), mult(mult_) {}
  KTC_INLINE void group(int64_t g) {
    if (!Called) V::prefetch(mult + g * S::kMultBytes + kMultAhead);
    if constexpr (S::kCodebook) {
      V::load_select(mult + g * S::kMultBytes, &m0, &m1);
    } else if constexpr (S::kMultiplier) {
      m0 = V::load_mult(mult + g * kBlockRows);
      m1 = V::load_mult(mult + g * kBlockRows + 16);
    }
  }
  KTC_INLINE const uint8_t* at(int64_t l) const { return tiles + l * kRowBytes; }
  KTC_INLINE void line(const uint8_t* run, int64_t i, typename V::B* w0, typename V::B* w1) const {
    const uint8_t* p = run + i * kRowBytes;
    if (!Called && i % 2 == 0) call_ahead<V>(p, end);
    if constexpr (S::kCodebook) {
      V::codebook(V::bload(p), m0, m1, w0, w1);
    } else {
      V::nibbles(V::bload(p), w0, w1);
      if constexpr (S::kMultiplier) {
        *w0 = V::scale_nibbles(*w0, m0);
        *w1 = V::scale_nibbles(*w1, m1);
      }
    }
  }
};

template <class S>
KTC_INLINE const uint8_t* block_mult(const ktc_gemm_args& a, int64_t b, int64_t groups) {
  return a.weight.mult + b * groups * S::kMultBytes;
}

/* Lines of one piece: all of one group. */
constexpr int64_t kUnpackLines = 4;

/* The piece whose lines begin at `lines` and which is the block's i-th (16 columns of k each), to `out` (the
 * first of the two tiles). Weights come from L2, where they have been called long before. */
template <class S, class V>
KTC_INLINE void unpack_piece(const uint8_t* lines, const uint8_t* mult, int64_t i, uint8_t* out) {
  NibbleLines<S, V, true> from(lines, nullptr, mult);
  if constexpr (S::kMultiplier) from.group(int64_t(uint64_t(16 * i) / uint64_t(S::kGroup)));
  _Pragma("GCC unroll 4") for (int64_t l = 0; l < kUnpackLines; ++l) {
    typename V::B w0, w1;
    from.line(lines, l, &w0, &w1);
    V::bstore(out + l * kRowBytes, w0);
    V::bstore(out + l * kRowBytes + kTile, w1);
  }
}

/* Steps [s_begin, s_end) of one int4 block into a panel whose first step is s_begin. */
template <class S, class V>
KTC_INLINE void unpack_steps(const uint8_t* tiles, const uint8_t* mult, int64_t s_begin, int64_t s_end,
                             uint8_t* panel) {
  constexpr int64_t kRun = S::kRunK / 4; /* lines that share a group */
  NibbleLines<S, V> lines(tiles, tiles + s_end * kTile, mult);
  for (int64_t s = s_begin; s < s_end; ++s) {
    uint8_t* out = panel + (s - s_begin) * 2 * kTile;
    for (int64_t r = 0; r < 16; r += kRun) {
      if constexpr (S::kMultiplier) lines.group((64 * s + 4 * r) / S::kGroup);
      const uint8_t* const run = lines.at(16 * s + r);
      for (int64_t i = 0; i < kRun; ++i) {
        typename V::B w0, w1;
        lines.line(run, i, &w0, &w1);
        V::bstore(out + (r + i) * kRowBytes, w0);
        V::bstore(out + (r + i) * kRowBytes + kTile, w1);
      }
    }
  }
}

}  // namespace ktc
#endif  // KTC_KERNELS_UNPACK_H
