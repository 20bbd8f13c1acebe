/* What the vector units do while the tile unit multiplies: finish rows whose sums are complete (scales,
 * activation function, store), make the output lines of the next ones ready to be written, and unpack or
 * prefetch the next chunk of weights. All of it in pieces, a few per tile product.
 *
 * What this header is not: tile products (gemm_tile.h), or what a finished row looks like (epilogue.h).
 */
#ifndef KTC_KERNELS_SIDE_WORK_H
#define KTC_KERNELS_SIDE_WORK_H

#include "ktc/kernels/epilogue.h"
#include "ktc/kernels/unpack.h"

namespace ktc {

/* Blocking of the tile kernels, and where things lie in their scratch. */
template <class S>
struct TileShape {
  static constexpr int64_t kRunBytes =
      S::kInteger && S::kGroupScale ? S::kRunK : 64; /* of one tile product */
  static constexpr int64_t kRunsPerStep = 64 / kRunBytes;
  static constexpr int64_t kGroupSteps = S::kGroupScale && S::kGroup > 64 ? S::kGroup / 64 : 1;
  static constexpr int64_t kChunkSteps = ceil_div(12, kGroupSteps) * kGroupSteps; /* 24 KB of B tiles */
  /* Two shorter panels of unpacked weights stay in L1 together with the sums of a few pairs; the sums of many
   * are in L2 in any case and should go there less often. */
  static constexpr int64_t chunk_steps(int64_t rows) {
    return S::kFormat == KTC_INT4 && !S::kGroupScale && rows <= 128 ? kChunkSteps * 2 / 3 : kChunkSteps;
  }
  static constexpr int64_t kPairRows = 32;
  static constexpr int64_t kCBytes = 4 * kTile; /* accumulators of one pair */
  /* Rows that share L2 with the weights: at most kMaxRows, fewer if they are long. */
  static constexpr int64_t kMaxRows = 512, kMinRows = 64, kRowsBytes = 1 << 20;
  static constexpr int64_t rows_at_once(int64_t steps) {
    const int64_t fit = kRowsBytes / (steps * kRowBytes) / kPairRows * kPairRows;
    return fit > kMaxRows ? kMaxRows : fit < kMinRows ? kMinRows : fit;
  }

  static constexpr int64_t kPanelBytes = S::kFormat == KTC_INT4 ? kChunkSteps * 2 * kTile : 0;
  static constexpr int64_t kSumsBytes = kMaxRows / kPairRows * kCBytes;
  static constexpr int64_t kGroupBytes = S::kGroupScale ? 2 * kCBytes : 0;
  static constexpr int64_t scratch_bytes() { return 2 * kPanelBytes + kSumsBytes + kGroupBytes; }
};

/* A piece of one weight block: steps [begin, end) of block b. */
struct Chunk {
  int64_t b, begin, end;
};

template <class S, class V>
class SideWork {
  using I = typename V::I;
  using F = typename V::F;
  /* A piece of the next chunk: half a step to unpack, or a line to prefetch. */
  static constexpr int64_t kPieceBytes = S::kFormat == KTC_INT4 ? kTile / 2 : kRowBytes;

 public:
  SideWork(const ktc_gemm_args& args, int epilogue) : a_(args), epilogue_(epilogue), k_(S::k(args.k)) {
    groups_ = S::groups(k_);
  }

  /* How much of everything is due per step, as running credits. */
  struct Pace {
    int64_t steps, rows, pieces, lines; /* to do over all steps                        */
    int64_t row_credit, piece_credit, line_credit;
    int64_t line; /* next output row to make ready               */
  };

  /* For a pair of `steps` steps whose own `out_rows` rows will be written later. */
  KTC_INLINE Pace pace(int64_t steps, int64_t out_rows) const {
    return Pace{steps, min64(ready_ - done_, rows_per_pair_), ahead_end_ - ahead_done_, out_rows, 0, 0, 0, 0};
  }
  KTC_INLINE void some(Pace& p, int64_t m, int64_t b) {
    for (p.row_credit += p.rows; p.row_credit >= 4 * p.steps; p.row_credit -= 4 * p.steps) finish_some();
    for (p.piece_credit += p.pieces; p.piece_credit >= p.steps; p.piece_credit -= p.steps) ahead_piece();
    for (p.line_credit += p.lines; p.line_credit >= p.steps; p.line_credit -= p.steps)
      ready_row(m + p.line++, b);
  }

  /* ---- rows whose sums are complete but not yet written out: a queue in the order of computation ----
   * The sums of a pair stay where they are until the same pair of the next block needs the place, so that
   * a block's rows can be finished evenly over all chunks of the next one. Counters run over blocks. */

  /* Rows [m0, m1) from the first block on, `chunks` chunks a block; pair p's sums are at sums + p * kCBytes.
   */
  KTC_INLINE void start_rows(int64_t m0, int64_t m1, int64_t chunks, const uint8_t* sums) {
    m0_ = m0;
    rows_ = m1 - m0;
    sums_ = sums;
    rows_per_pair_ = ceil_div(TileShape<S>::kPairRows, chunks);
    done_ = ready_ = 0;
    next_row_ = 0;
    next_block_ = a_.block_begin;
  }
  KTC_INLINE void rows_ready(int64_t rows) { ready_ += rows; }
  KTC_INLINE void finish_rows() {
    while (done_ < ready_) finish_some();
  }
  /* The pair of row m is about to overwrite its sums with those of block b. */
  KTC_INLINE void free_sums(int64_t b, int64_t m) {
    const int64_t end = (b - 1 - a_.block_begin) * rows_ + min64(m - m0_ + TileShape<S>::kPairRows, rows_);
    while (done_ < end) finish_some();
  }

  /* sums[row] (+)= what one group contributes. */
  KTC_NOINLINE void add_row(const uint8_t* products, int64_t m, int64_t b, int64_t g, int64_t row,
                            float* sums, bool first) {
    for (int h = 0; h < 2; ++h) {
      const int64_t at = ((row / kTileRows) * 2 + h) * kTile + (row % kTileRows) * kRowBytes;
      float* sum = sums + at / 4;
      const I acc = V::iload(reinterpret_cast<const int32_t*>(products + at));
      V::store(sum, add_group<S, V>(a_, m + row, b, g, groups_, h, acc, first ? V::zero() : V::load(sum)));
    }
  }

  /* ---- the next chunk of weights ---- */

  const uint8_t* block(int64_t b) const { return a_.weight.tiles + b * S::block_bytes(k_); }

  KTC_INLINE void start_ahead(const Chunk& next, uint8_t* panel) {
    ahead_ = next;
    ahead_panel_ = panel;
    ahead_bytes_ = block(next.b) + next.begin * S::kTilesPerStep * kTile;
    ahead_done_ = ahead_end_ = 0;
    const bool any = next.b < a_.block_end;
    ahead_total_ = any ? (next.end - next.begin) * S::kTilesPerStep * kTile / kPieceBytes : 0;
  }
  KTC_INLINE void finish_ahead() {
    while (ahead_done_ < ahead_end_) ahead_piece();
  }
  /* Pair number `pair` of `pairs` (from 1) has this much of it done when it ends. */
  KTC_INLINE void share_ahead(int64_t pair, int64_t pairs) { ahead_end_ = ahead_total_ * pair / pairs; }

  void unpack_all(const Chunk& c, uint8_t* panel) {
    for (int64_t i = 0; i < c.end - c.begin; ++i) unpack(c, i, panel);
  }

 private:
  /* The next rows of the queue: four where a tile holds so many more, else one. */
  KTC_NOINLINE void finish_some() {
    if (ready_ - done_ >= 4 && next_row_ % 4 == 0 && rows_ - next_row_ >= 4) {
      finish<4>();
    } else {
      finish<1>();
    }
  }
  template <int N>
  KTC_INLINE void finish() {
    const int64_t row = next_row_, b = next_block_, m = m0_ + row;
    const uint8_t* c = sums_ + (row / kTileRows) * 2 * kTile + (row % kTileRows) * kRowBytes;
    done_ += N;
    next_row_ = row + N;
    if (next_row_ == rows_) {
      next_row_ = 0;
      next_block_ = b + 1;
    }
    if constexpr (S::kGroupScale || !S::kInteger) {
      Vectors<V, N> y0, y1;
      KTC_EACH(N, y0.v[i] = V::load(reinterpret_cast<const float*>(c + i * kRowBytes)));
      KTC_EACH(N, y1.v[i] = V::load(reinterpret_cast<const float*>(c + i * kRowBytes + kTile)));
      if constexpr (S::kInteger) {
        emit_grouped<S, V, N>(a_, epilogue_, m, b, y0, y1);
      } else {
        emit<V, N>(a_, epilogue_, m, b, y0, y1);
      }
    } else {
      I acc0[N], acc1[N];
      KTC_EACH(N, acc0[i] = V::iload(reinterpret_cast<const int32_t*>(c + i * kRowBytes)));
      KTC_EACH(N, acc1[i] = V::iload(reinterpret_cast<const int32_t*>(c + i * kRowBytes + kTile)));
      emit_int<S, V, N>(a_, epilogue_, m, b, acc0, acc1);
    }
  }

  /* The output lines of row m: written one pair later, so fetched for writing now. */
  KTC_INLINE void ready_row(int64_t m, int64_t b) {
    const int64_t row = epilogue_ == KTC_SCATTER_ADD ? a_.row_index[m] : m;
    const float* out = a_.out + row * a_.ld_out + b * (is_gated(epilogue_) ? 16 : kBlockRows);
    V::prefetch_write(out);
    if (!is_gated(epilogue_)) V::prefetch_write(out + 16);
  }

  KTC_INLINE void ahead_piece() {
    const int64_t i = ahead_done_++;
    if constexpr (S::kFormat == KTC_INT4) {
      unpack_piece(i);
    } else {
      V::prefetch_l2(ahead_bytes_ + i * kPieceBytes);
    }
  }
  KTC_NOINLINE void unpack_piece(int64_t i) {
    const uint8_t* mult = S::kMultiplier ? block_mult<S>(a_, ahead_.b, groups_) : nullptr;
    unpack_half<S, V>(block(ahead_.b), mult, 2 * ahead_.begin + i, ahead_panel_ + i / 2 * 2 * kTile);
  }
  KTC_INLINE void unpack(const Chunk& c, int64_t i, uint8_t* panel) {
    const uint8_t* mult = S::kMultiplier ? block_mult<S>(a_, c.b, groups_) : nullptr;
    unpack_steps<S, V>(block(c.b), mult, c.begin + i, c.begin + i + 1, panel + i * 2 * kTile);
  }

  const ktc_gemm_args& a_;
  const int epilogue_;
  const int64_t k_;
  int64_t groups_;
  int64_t m0_ = 0, rows_ = 0, rows_per_pair_ = 0; /* of this group of rows */
  int64_t done_ = 0, ready_ = 0;                  /* rows written out; rows complete */
  int64_t next_row_ = 0, next_block_ = 0;         /* of the next row to write out */
  const uint8_t* sums_ = nullptr;
  Chunk ahead_{0, 0, 0};
  uint8_t* ahead_panel_ = nullptr;
  const uint8_t* ahead_bytes_ = nullptr;
  int64_t ahead_done_ = 0, ahead_end_ = 0, ahead_total_ = 0;
};

}  // namespace ktc
#endif  // KTC_KERNELS_SIDE_WORK_H
