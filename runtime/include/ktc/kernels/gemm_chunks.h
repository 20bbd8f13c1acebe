/* GEMM on vectors by dot products, for more rows than registers hold sums of.
 *
 * Loops, outside in: rows whose activations share L2 with the weights -> weight blocks -> chunks of K whose
 * bytes stay in L1 -> groups of rows. Sums wait in scratch between chunks. An int4 chunk is unpacked by the
 * first group of rows, which leaves its bytes in a panel for the others: alone, unpacking would leave the
 * multipliers idle. While rows sweep over one chunk they call the weights after it, evenly, so that DRAM
 * works throughout.
 *
 * Sums are those of gemm_dot.h: the same bits.
 */
#ifndef KTC_KERNELS_GEMM_CHUNKS_H
#define KTC_KERNELS_GEMM_CHUNKS_H

#include "ktc/kernels/gemm_dot.h"
#include "ktc/kernels/weight_stream.h"

namespace ktc {

constexpr int64_t kChunkSteps = 12; /* 24 KB of operands, and 6 KB of a group's activations */
constexpr int64_t kChunkMaxRows = 512, kChunkRowsBytes = 1 << 20;

/* Whether 2 x kIntRows sums and two lines of weights fit the registers. */
template <class S, class V>
constexpr bool is_chunked() {
  return is_dot<S, V>() && !S::kGroupScale && V::kIntRows >= 8;
}

/* Rows at once: a multiple of the rows of a tile. */
template <class S>
constexpr int64_t chunk_rows_at_once(int64_t k) {
  const int64_t fit = kChunkRowsBytes / (S::steps(k) * kRowBytes) / kTileRows * kTileRows;
  return fit > kChunkMaxRows ? kChunkMaxRows : fit < kTileRows ? kTileRows : fit;
}
constexpr int64_t kChunkPanelBytes = kChunkSteps * 2 * kTile;
constexpr int64_t kChunkScratchBytes = kChunkPanelBytes + kChunkMaxRows * 2 * kRowBytes;

/* Lines of a chunk that are in L1 or L2 already. */
template <class V>
struct ChunkLines {
  const uint8_t* bytes; /* of the chunk's first step */
  static constexpr int64_t kRun = 16;
  KTC_INLINE void group(int64_t) {}
  KTC_INLINE const uint8_t* at(int64_t l) const { return bytes + l * 2 * kRowBytes; }
  KTC_INLINE void line(const uint8_t* run, int64_t i, typename V::B* w0, typename V::B* w1) const {
    const uint8_t* p = run + i * kRowBytes;
    *w0 = V::bload(p);
    *w1 = V::bload(p + kTile);
  }
};

/* Lines of an int4 chunk whose first step is `begin` of its block, left as bytes in the panel on the way. */
template <class S, class V>
struct UnpackedLines {
  NibbleLines<S, V, true> nibbles;
  int64_t begin;
  uint8_t* panel;
  static constexpr int64_t kRun = S::kRunK / S::kLineK; /* lines that share a group */
  KTC_INLINE void group(int64_t l) {
    nibbles.group(int64_t(uint64_t(64 * begin + 4 * l) / uint64_t(S::kGroup)));
  }
  struct Run {
    const uint8_t* from;
    uint8_t* to;
  };
  KTC_INLINE Run at(int64_t l) const {
    return Run{nibbles.at(l), panel + l / 16 * 2 * kTile + l % 16 * kRowBytes};
  }
  KTC_INLINE void line(const Run& run, int64_t i, typename V::B* w0, typename V::B* w1) const {
    nibbles.line(run.from, i, w0, w1);
    uint8_t* p = run.to + i * kRowBytes;
    V::bstore(p, *w0);
    V::bstore(p + kTile, *w1);
  }
};

/* What all rows sweep over next: steps [begin, end) of block b. */
struct ChunkSweep {
  int64_t b, begin, end;
  bool last; /* of the block: rows end here */
};

/* Rows m..m+R over one chunk; the last R - valid of them lie in the same tile and are not written. sums:
 * [R][2] between chunks. calls: of later weights, at each step. */
template <class S, class V, int R, class Lines>
KTC_NOINLINE void chunk_rows(const ktc_gemm_args& a, int epilogue, const ChunkSweep& c, Lines lines,
                             int64_t k, int64_t m, int64_t valid, DotSum<S, V>* sums,
                             WeightStream<S, V>& stream, int64_t calls) {
  using Sum = DotSum<S, V>;
  Sum acc[R][2];
  for (int r = 0; r < R; ++r) {
    acc[r][0] = c.begin ? sums[2 * r] : Sum{};
    acc[r][1] = c.begin ? sums[2 * r + 1] : Sum{};
  }
  const uint8_t* x = act_row(a.act, m, S::steps(k)) + c.begin * kTile;
  for (int64_t l = 0; l < 16 * (c.end - c.begin); l += 16, x += kTile) {
    for (int64_t i = 0; i < calls; ++i) stream.call();
    for (int64_t run = 0; run < 16; run += Lines::kRun) {
      lines.group(l + run);
      dot_lines<V, R, Lines::kRun>(acc, lines, l + run, x + 4 * run);
    }
  }
  if (!c.last) {
    for (int r = 0; r < R; ++r) sums[2 * r] = acc[r][0], sums[2 * r + 1] = acc[r][1];
    return;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    if (r < valid) finish_dot<S, V>(a, epilogue, m + r, c.b, acc[r][0], acc[r][1]);
  }
}

/* Groups of rows over one chunk: R at a time, the tail with the smallest of R, R / 2, ... that covers it. */
template <class S, class V>
struct ChunkRows {
  const ktc_gemm_args& a;
  int epilogue;
  const ChunkSweep& c;
  int64_t k, m0, m1; /* rows of this sweep */
  DotSum<S, V>* sums;
  WeightStream<S, V>& stream;

  template <int R, class Lines>
  KTC_INLINE void group(const Lines& lines, int64_t m) {
    const int64_t at = ((c.b - a.block_begin) * S::steps(k) + c.begin) * S::kTilesPerStep * kTile;
    const int64_t size = (c.end - c.begin) * S::kTilesPerStep * kTile;
    const int64_t valid = min64(R, m1 - m);
    const int64_t due = stream.aim(at + size * (m + valid - m0) / (m1 - m0));
    chunk_rows<S, V, R>(a, epilogue, c, lines, k, m, valid, sums + 2 * (m - m0), stream,
                        ceil_div(due, c.end - c.begin));
  }
  template <int R>
  KTC_INLINE void from(const ChunkLines<V>& lines, int64_t m) {
    for (; m1 - m > R / 2; m += R) group<R>(lines, m);
    if constexpr (R > 1) from<R / 2>(lines, m);
  }
};

template <class S, class V>
KTC_NOINLINE void gemm_chunks(const ktc_gemm_args& a, int epilogue) {
  constexpr int R = V::kIntRows;
  const int64_t k = S::k(a.k), steps = S::steps(k), at_once = chunk_rows_at_once<S>(k);
  uint8_t* const panel = static_cast<uint8_t*>(a.scratch);
  auto* const sums = reinterpret_cast<DotSum<S, V>*>(panel + kChunkPanelBytes);
  for (int64_t m = a.m_begin; m < a.m_end; m += at_once) {
    WeightStream<S, V> stream(a, k);
    stream.begin();
    for (int64_t b = a.block_begin; b < a.block_end; ++b) {
      const uint8_t* const tiles = a.weight.tiles + b * S::block_bytes(k);
      for (int64_t s = 0; s < steps; s += kChunkSteps) {
        const uint8_t* const chunk = tiles + s * S::kTilesPerStep * kTile;
        const ChunkSweep c{b, s, min64(s + kChunkSteps, steps), s + kChunkSteps >= steps};
        ChunkRows<S, V> rows{a, epilogue, c, k, m, min64(m + at_once, a.m_end), sums, stream};
        if constexpr (S::kFormat == KTC_INT4) {
          const uint8_t* const mult = block_mult<S>(a, b, S::groups(k));
          rows.template group<R>(UnpackedLines<S, V>{NibbleLines<S, V, true>(chunk, nullptr, mult), s, panel},
                                 m);
          rows.template from<R>(ChunkLines<V>{panel}, m + R);
        } else {
          rows.template from<R>(ChunkLines<V>{chunk}, m);
        }
      }
    }
  }
}

}  // namespace ktc
#endif  // KTC_KERNELS_GEMM_CHUNKS_H
