/* What the vector units do while the tile unit multiplies: finish rows whose sums are complete (scales,
 * activation function, store), unpack the next chunk of int4 weights, call later weights from DRAM.
 *
 * Each kind of work is dealt out evenly over the steps of the tile loop (Pace) and keeps its cursor in a
 * small value type that is a local variable of that loop: tile instructions are opaque to the compiler, so
 * that anything kept in memory would be read and written again around each of them, and a few hundred such
 * instructions per step are more than four tile products hide.
 *
 * What this header is not: tile products (gemm_tile.h), or what a finished row looks like (epilogue.h).
 */
#ifndef KTC_KERNELS_SIDE_WORK_H
#define KTC_KERNELS_SIDE_WORK_H

#include "ktc/kernels/epilogue.h"
#include "ktc/kernels/unpack.h"
#include "ktc/kernels/weight_stream.h"

namespace ktc {

/* Blocking of the tile kernels, and where things lie in their scratch. */
template <class S>
struct TileShape {
  static constexpr int64_t kRunBytes =
      S::kInteger && S::kGroupScale ? S::kRunK : 64; /* of one tile product */
  static constexpr int64_t kRunsPerStep = 64 / kRunBytes;
  static constexpr int64_t kGroupSteps = S::kGroupScale && S::kGroup > 64 ? S::kGroup / 64 : 1;
  static constexpr int64_t kChunkSteps =
      ceil_div(S::kFormat == KTC_INT4 ? 12 : 16, kGroupSteps) * kGroupSteps;
  /* Steps of a chunk for so many rows. The sums of a few pairs of A tiles fit L1 if chunks are short, for
   * int4 very short, since two panels are there too; those of many are in L2 in any case and should go there
   * less often. Measured, docs/kernels.md. */
  static constexpr int64_t chunk_steps(int64_t rows) {
    if (S::kGroupScale) return kChunkSteps;
    if (S::kFormat == KTC_INT4) return rows <= 128 ? 4 : rows <= 192 ? 8 : kChunkSteps;
    return rows <= 128 ? 8 : kChunkSteps;
  }
  static constexpr int64_t kPairRows = 32;
  static constexpr int64_t kCBytes = 4 * kTile; /* accumulators of one pair */
  /* Rows that share L2 with the weights, of `rows` in all: as even groups as possible of at most kMaxRows and
   * kRowsBytes. A third more is better than reading the weights twice. */
  static constexpr int64_t kMaxRows = 512, kMinRows = 64, kRowsBytes = 1 << 20;
  static constexpr int64_t rows_at_once(int64_t rows, int64_t steps) {
    const int64_t row_bytes = steps * kRowBytes;
    if (rows <= kMaxRows && rows * row_bytes <= kRowsBytes * 4 / 3) return rows;
    const int64_t fit = kRowsBytes / row_bytes / kPairRows * kPairRows;
    const int64_t most = fit > kMaxRows ? kMaxRows : fit < kMinRows ? kMinRows : fit;
    return ceil_div(ceil_div(rows, ceil_div(rows, most)), kTileRows) * kTileRows;
  }

  static constexpr int64_t kPanelBytes = S::kFormat == KTC_INT4 ? kChunkSteps * 2 * kTile : 0;
  static constexpr int64_t kSumsBytes = kMaxRows / kPairRows * kCBytes;
  static constexpr int64_t kGroupBytes = S::kGroupScale ? 2 * kCBytes : 0;
  static constexpr int64_t scratch_bytes() { return 2 * (kPanelBytes + kSumsBytes) + kGroupBytes; }
};

/* A piece of one weight block: steps [begin, end) of block b. */
struct Chunk {
  int64_t b, begin, end;
};

/* Rows of one block whose sums are complete; the next block's sums go elsewhere meanwhile. A step of the tile
 * loop has four places for side work, the slots. A GATED row ends in as many parts, one in each slot of a
 * step; other rows end in the third. */
template <class S, class V, int Epilogue>
class RowEnd {
  static constexpr bool kGated = is_gated(Epilogue);
  static constexpr int64_t kColumns = kGated ? 16 : kBlockRows; /* of one block */

 public:
  explicit RowEnd(const ktc_gemm_args& a) : past_(goes_past(a)) {}
  /* Rows [m0, m1) of block b, over `steps` steps. `sums` of the first pair; a pair's follow 4 tiles further
   * on. */
  KTC_INLINE void start(const ktc_gemm_args& a, const uint8_t* sums, int64_t b, int64_t m0, int64_t m1,
                        int64_t steps) {
    sums_ = sums;
    b_ = b;
    m0_ = m0;
    row_ = 0;
    rows_ = m1 - m0;
    out_ = a.out + (Epilogue == KTC_SCATTER_ADD ? 0 : m0 * a.ld_out) + b * kColumns;
    whole_ = a.n_out >= (b + 1) * kColumns;
    pace_.set(rows_, steps);
  }
  template <int Slot>
  KTC_INLINE void slot(const ktc_gemm_args& a) {
    if constexpr (kGated) {
      if (Slot == 0) {
        int32_t n = pace_.due();
        for (; n > 1; --n) finish(a);
        busy_ = n > 0 && row_ < rows_;
      }
      if (busy_) part<Slot>(a);
    } else if (Slot == 2) {
      for (int32_t n = pace_.due(); n > 0; --n) finish(a);
    }
  }
  KTC_INLINE void rest(const ktc_gemm_args& a) {
    while (row_ < rows_) finish(a);
  }
  /* After the last row: what went past the caches is in memory for whoever is told so. */
  KTC_INLINE void done() const {
    if (past_) V::fence_past();
  }

 private:
  using F = typename V::F;
  using I = typename V::I;
  /* An output as large as this will have left L2 before it is read. Stored past the caches it need not be
   * fetched first, and displaces nothing. */
  static constexpr int64_t kPastBytes = 256 << 10;
  static bool goes_past(const ktc_gemm_args& a) {
    return Epilogue == KTC_STORE && reinterpret_cast<uintptr_t>(a.out) % kRowBytes == 0 &&
           a.ld_out % 16 == 0 && (a.m_end - a.m_begin) * a.n_out * int64_t(sizeof(float)) >= kPastBytes;
  }

  static constexpr int64_t kReady = 4; /* rows later */

  /* Both halves of the row's sums, scaled and with their bias. */
  KTC_INLINE void sums(const ktc_gemm_args& a, F* y0, F* y1) const {
    const uint8_t* const c = sums_ + (row_ + (row_ & -kTileRows)) * kRowBytes;
    const int64_t m = m0_ + row_;
    if constexpr (S::kInteger && !S::kGroupScale) {
      static_assert(S::kOffset == 128, "a shift by 7");
      const I comp = V::template shl<7>(V::iset1(a.act.sums[m]));
      const F row = V::set1(a.act.scale[m]);
      const float* const scale = a.weight.scale + b_ * kBlockRows;
      *y0 = scale_int<V>(V::iload(reinterpret_cast<const int32_t*>(c)), comp, row, scale);
      *y1 = scale_int<V>(V::iload(reinterpret_cast<const int32_t*>(c + kTile)), comp, row, scale + 16);
    } else {
      *y0 = V::load(reinterpret_cast<const float*>(c));
      *y1 = V::load(reinterpret_cast<const float*>(c + kTile));
      if (S::kGroupScale) {
        const F row = V::set1(a.act.scale[m]);
        *y0 = V::mul(*y0, row);
        *y1 = V::mul(*y1, row);
      }
    }
    if (a.weight.bias) {
      *y0 = add_bias<V>(a, b_, 0, *y0);
      *y1 = add_bias<V>(a, b_, 1, *y1);
    }
  }
  template <int Part>
  KTC_INLINE void part(const ktc_gemm_args& a) {
    if (Part == 0) {
      ready(a);
      sums(a, &gating_.gate, &gating_.up);
    } else if (Part == 1) {
      gating_.split(Epilogue, a.act_alpha, a.act_limit);
    } else if (Part == 2) {
      gating_.power();
    } else {
      gating_.join();
      if (whole_) {
        V::store(out_, gating_.gate);
        if (a.row_amax) see_amax<V>(a.row_amax + m0_ + row_, gating_.gate);
      } else {
        put_gated<V>(a, m0_ + row_, b_, gating_.gate);
      }
      next(a);
    }
  }
  KTC_INLINE void finish(const ktc_gemm_args& a) {
    if (row_ >= rows_) return;
    if constexpr (kGated) {
      part<0>(a);
      part<1>(a);
      part<2>(a);
      part<3>(a);
    } else {
      F y0, y1;
      if (!past_) ready(a);
      sums(a, &y0, &y1);
      if (Epilogue == KTC_STORE && whole_) {
        if (past_) {
          V::store_past(out_, y0);
          V::store_past(out_ + 16, y1);
        } else {
          V::store(out_, y0);
          V::store(out_ + 16, y1);
        }
      } else {
        put_half<V>(a, Epilogue, m0_ + row_, b_, 0, y0);
        put_half<V>(a, Epilogue, m0_ + row_, b_, 1, y1);
      }
      next(a);
    }
  }
  KTC_INLINE void next(const ktc_gemm_args& a) {
    if (Epilogue != KTC_SCATTER_ADD) out_ += a.ld_out;
    ++row_;
  }
  /* Output lines of a later row, fetched for writing. */
  KTC_INLINE void ready(const ktc_gemm_args& a) const {
    const float* out = out_ + kReady * a.ld_out;
    if constexpr (Epilogue == KTC_SCATTER_ADD) {
      if (row_ + kReady >= rows_) return;
      out = out_ + a.row_index[m0_ + row_ + kReady] * a.ld_out;
    }
    V::prefetch_write(out);
    if (!kGated) V::prefetch_write(out + 16);
  }

  const bool past_;
  const uint8_t* sums_ = nullptr;
  int64_t b_ = 0, m0_ = 0, row_ = 0, rows_ = 0; /* the block, its first row; the next to finish, and all */
  float* out_ = nullptr;                        /* of that row; SCATTER_ADD: of row 0 */
  bool whole_ = false;                          /* no column of the block is past the output */
  bool busy_ = false;                           /* with a row in this step */
  Gating<V> gating_;
  Pace pace_;
};

/* The next chunk of int4 weights on its way into a panel, a piece of four lines at a time. */
template <class S, class V>
class PanelFill {
 public:
  /* Over `steps` steps; nothing to do behind the last block. */
  KTC_INLINE void start(const ktc_gemm_args& a, int64_t k, const Chunk& next, uint8_t* panel, int64_t steps) {
    lines_ = a.weight.tiles + next.b * S::block_bytes(k) + next.begin * S::kTilesPerStep * kTile;
    if constexpr (S::kMultiplier) mult_ = block_mult<S>(a, next.b, S::groups(k));
    panel_ = panel;
    first_ = 4 * next.begin;
    piece_ = 0;
    pieces_ = next.b < a.block_end ? (next.end - next.begin) * kTileRows / kUnpackLines : 0;
    pace_.set(pieces_, steps);
  }
  KTC_INLINE void step() {
    for (int32_t n = pace_.due(); n > 0; --n) fill();
  }
  KTC_INLINE void rest() {
    while (piece_ < pieces_) fill();
  }

 private:
  KTC_INLINE void fill() {
    if (piece_ >= pieces_) return;
    unpack_piece<S, V>(lines_, mult_, first_ + piece_, panel_);
    lines_ += kUnpackLines * kRowBytes;
    panel_ += kUnpackLines * kRowBytes;
    if (++piece_ % 4 == 0) panel_ += kTile;
  }

  const uint8_t *lines_ = nullptr, *mult_ = nullptr;
  uint8_t* panel_ = nullptr;
  int64_t first_ = 0, piece_ = 0, pieces_ = 0; /* the chunk's first piece of the block; the next one; all */
  Pace pace_;
};

}  // namespace ktc
#endif  // KTC_KERNELS_SIDE_WORK_H
