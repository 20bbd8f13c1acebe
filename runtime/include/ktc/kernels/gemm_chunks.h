/* int8 and int4 GEMM on vectors with a byte dot product, for more rows than registers hold sums of.
 *
 * Loops, outside in: rows whose activations share L2 with the weights -> weight blocks -> chunks of K whose
 * bytes stay in L1 -> groups of rows. Sums wait in scratch between chunks; an int4 chunk is unpacked to bytes
 * once. While rows sweep over one chunk they call the weights after it, evenly, so that DRAM works
 * throughout.
 *
 * Sums are those of gemm_int.h: the same bits.
 */
#ifndef KTC_KERNELS_GEMM_CHUNKS_H
#define KTC_KERNELS_GEMM_CHUNKS_H

#include "ktc/kernels/epilogue.h"
#include "ktc/kernels/unpack.h"
#include "ktc/kernels/weight_stream.h"

namespace ktc {

constexpr int64_t kChunkSteps = 8; /* 16 KB of bytes, and 4 KB of a group's activations */
constexpr int64_t kChunkMaxRows = 512, kChunkRowsBytes = 1 << 20;

/* Whether 2 x kIntRows sums and two lines of weights fit the registers. */
template <class S, class V>
constexpr bool is_chunked() {
  return S::kInteger && !S::kGroupScale && V::kIntRows >= 8;
}

/* Rows at once: a multiple of the rows of a tile. */
constexpr int64_t chunk_rows_at_once(int64_t k) {
  const int64_t fit = kChunkRowsBytes / k / kTileRows * kTileRows;
  return fit > kChunkMaxRows ? kChunkMaxRows : fit < kTileRows ? kTileRows : fit;
}
constexpr int64_t kChunkPanelBytes = kChunkSteps * 2 * kTile;
constexpr int64_t kChunkScratchBytes = kChunkPanelBytes + kChunkMaxRows * 2 * kRowBytes;

/* What all rows sweep over next: steps [begin, end) of block b, as bytes. */
struct ChunkSweep {
  int64_t b, begin, end;
  const uint8_t* bytes;
  bool last; /* of the block: rows end here */
};

/* Rows m..m+R over one chunk; the last R - valid of them lie in the same tile and are not written. sums:
 * [R][2] between chunks. calls: of later weights, at each step. */
template <class S, class V, int R>
KTC_NOINLINE void chunk_rows(const ktc_gemm_args& a, int epilogue, const ChunkSweep& c, int64_t k, int64_t m,
                             int64_t valid, typename V::I* sums, WeightStream<S, V>& stream, int64_t calls) {
  using I = typename V::I;
  I acc[R][2];
  for (int r = 0; r < R; ++r) {
    acc[r][0] = c.begin ? sums[2 * r] : V::izero();
    acc[r][1] = c.begin ? sums[2 * r + 1] : V::izero();
  }
  const uint8_t* x = act_row(a.act, m, S::steps(k)) + c.begin * kTile;
  const uint8_t* w = c.bytes;
  for (int64_t s = c.begin; s < c.end; ++s, w += 2 * kTile, x += kTile) {
    for (int64_t i = 0; i < calls; ++i) stream.call();
#pragma GCC unroll 4
    for (int64_t i = 0; i < 16; ++i) {
      const typename V::B w0 = V::bload(w + i * kRowBytes), w1 = V::bload(w + kTile + i * kRowBytes);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const I xv = V::iset1(load_i32(x + r * kRowBytes + 4 * i));
        acc[r][0] = V::dot(acc[r][0], w0, xv);
        acc[r][1] = V::dot(acc[r][1], w1, xv);
      }
    }
  }
  if (!c.last) {
    for (int r = 0; r < R; ++r) sums[2 * r] = acc[r][0], sums[2 * r + 1] = acc[r][1];
    return;
  }
  for (int r = 0; r < R && r < valid; ++r) finish_int<S, V>(a, epilogue, m + r, c.b, acc[r][0], acc[r][1]);
}

/* Rows m.. of [m0, m1): R at a time, the tail with the smallest of R, R / 2, ... that covers it. */
template <class S, class V, int R>
KTC_INLINE void chunk_sweep(const ktc_gemm_args& a, int epilogue, const ChunkSweep& c, int64_t k, int64_t m0,
                            int64_t m, int64_t m1, typename V::I* sums, WeightStream<S, V>& stream) {
  const int64_t steps = S::steps(k);
  const int64_t at = ((c.b - a.block_begin) * steps + c.begin) * S::kTilesPerStep * kTile;
  const int64_t size = (c.end - c.begin) * S::kTilesPerStep * kTile;
  for (; m1 - m > R / 2; m += R) {
    const int64_t valid = min64(R, m1 - m);
    const int64_t due = stream.aim(at + size * (m + valid - m0) / (m1 - m0));
    chunk_rows<S, V, R>(a, epilogue, c, k, m, valid, sums + 2 * (m - m0), stream,
                        ceil_div(due, c.end - c.begin));
  }
  if constexpr (R > 1) chunk_sweep<S, V, R / 2>(a, epilogue, c, k, m0, m, m1, sums, stream);
}

template <class S, class V>
KTC_NOINLINE void gemm_chunks(const ktc_gemm_args& a, int epilogue) {
  const int64_t k = S::k(a.k), steps = S::steps(k), at_once = chunk_rows_at_once(k);
  uint8_t* const panel = static_cast<uint8_t*>(a.scratch);
  auto* const sums = reinterpret_cast<typename V::I*>(panel + kChunkPanelBytes);
  for (int64_t m = a.m_begin; m < a.m_end; m += at_once) {
    WeightStream<S, V> stream(a, k);
    stream.begin();
    for (int64_t b = a.block_begin; b < a.block_end; ++b) {
      const uint8_t* const tiles = a.weight.tiles + b * S::block_bytes(k);
      for (int64_t s = 0; s < steps; s += kChunkSteps) {
        const uint8_t* const chunk = tiles + s * S::kTilesPerStep * kTile;
        ChunkSweep c{b, s, min64(s + kChunkSteps, steps), chunk, s + kChunkSteps >= steps};
        if constexpr (S::kFormat == KTC_INT4) {
          const uint8_t* const mult = block_mult<S>(a, b, S::groups(k));
          for (int64_t i = 0; i < 4 * (c.end - s); ++i) {
            unpack_piece<S, V>(chunk + i * kUnpackLines * kRowBytes, mult, 4 * s + i,
                               panel + i / 4 * 2 * kTile + i % 4 * kUnpackLines * kRowBytes);
          }
          c.bytes = panel;
        }
        chunk_sweep<S, V, V::kIntRows>(a, epilogue, c, k, m, m, min64(m + at_once, a.m_end), sums, stream);
      }
    }
  }
}

}  // namespace ktc
#endif  // KTC_KERNELS_GEMM_CHUNKS_H
