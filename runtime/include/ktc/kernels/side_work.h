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
  static constexpr int64_t kChunkSteps = ceil_div(12, kGroupSteps) * kGroupSteps; /* 24 KB of B tiles */
  /* Shorter chunks stay in L1 together with the sums of a few pairs; the sums of many are in L2 in any case
   * and should go there less often. */
  static constexpr int64_t chunk_steps(int64_t rows) {
    return !S::kGroupScale && rows <= 128 ? kChunkSteps * 2 / 3 : kChunkSteps;
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
  static constexpr int64_t scratch_bytes() { return 2 * (kPanelBytes + kSumsBytes) + kGroupBytes; }
};

/* A piece of one weight block: steps [begin, end) of block b. */
struct Chunk {
  int64_t b, begin, end;
};

/* Rows of one block whose sums are complete; the next block's sums go elsewhere meanwhile. */
template <class S, class V, int Epilogue>
class RowEnd {
 public:
  explicit RowEnd(const ktc_gemm_args& a) : past_(goes_past(a)) {}
  /* Rows [m0, m1) of block b, over `steps` steps. `sums` of the first pair; a pair's follow 4 tiles further
   * on. */
  KTC_INLINE void start(const uint8_t* sums, int64_t b, int64_t m0, int64_t m1, int64_t steps) {
    next_ = sums;
    b_ = b;
    m_ = m0;
    m0_ = m0;
    m1_ = m1;
    pace_.set(m1 - m0, steps);
  }
  KTC_INLINE void step(const ktc_gemm_args& a) {
    for (int32_t n = pace_.due(); n > 0; --n) finish(a);
  }
  KTC_INLINE void rest(const ktc_gemm_args& a) {
    while (m_ < m1_) finish(a);
  }
  /* After the last row: what went past the caches is in memory for whoever is told so. */
  KTC_INLINE void done() const {
    if (past_) V::fence_past();
  }

 private:
  /* An output as large as this will have left L2 before it is read. Stored past the caches it need not be
   * fetched first, and displaces nothing. */
  static constexpr int64_t kPastBytes = 256 << 10;
  static bool goes_past(const ktc_gemm_args& a) {
    return Epilogue == KTC_STORE && reinterpret_cast<uintptr_t>(a.out) % kRowBytes == 0 &&
           a.ld_out % 16 == 0 && (a.m_end - a.m_begin) * a.n_out * int64_t(sizeof(float)) >= kPastBytes;
  }

  static constexpr int64_t kReady = 4; /* rows later */

  KTC_INLINE void finish(const ktc_gemm_args& a) {
    if (m_ >= m1_) return;
    const int64_t m = m_++;
    const uint8_t* const c = next_;
    next_ += (m_ - m0_) % kTileRows ? kRowBytes : kRowBytes + kTile;
    if (!past_) ready(a, m);
    if constexpr (S::kGroupScale || !S::kInteger) {
      Vectors<V, 1> y0{{V::load(reinterpret_cast<const float*>(c))}};
      Vectors<V, 1> y1{{V::load(reinterpret_cast<const float*>(c + kTile))}};
      if constexpr (S::kInteger) {
        emit_grouped<S, V, 1>(a, Epilogue, m, b_, y0, y1, past_);
      } else {
        emit<V, 1>(a, Epilogue, m, b_, y0, y1, past_);
      }
    } else {
      emit_int<S, V, 1>(a, Epilogue, m, b_, {V::iload(reinterpret_cast<const int32_t*>(c))},
                        {V::iload(reinterpret_cast<const int32_t*>(c + kTile))}, past_);
    }
  }
  /* Output lines of a later row, fetched for writing. */
  KTC_INLINE void ready(const ktc_gemm_args& a, int64_t m) const {
    if (Epilogue == KTC_SCATTER_ADD && m + kReady >= m1_) return;
    const int64_t to = Epilogue == KTC_SCATTER_ADD ? a.row_index[m + kReady] : m + kReady;
    const float* out = a.out + to * a.ld_out + b_ * (is_gated(Epilogue) ? 16 : kBlockRows);
    V::prefetch_write(out);
    if (!is_gated(Epilogue)) V::prefetch_write(out + 16);
  }

  const bool past_;
  const uint8_t* next_ = nullptr;
  int64_t b_ = 0, m0_ = 0, m_ = 0, m1_ = 0; /* the block; its rows, and the next one to finish */
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
