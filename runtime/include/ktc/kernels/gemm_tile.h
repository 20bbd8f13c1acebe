/* GEMM on matrix tiles (AMX, or its emulation): many rows of activations.
 *
 * The inner product is a 2x2 outer product: two A tiles (32 rows) against the two B tiles of one 32-row
 * weight block, so each step loads 4 KB for 4 tile products. Loops, outside in:
 *   rows in groups that fit L2 -> weight blocks -> chunks of K whose B tiles fit L1 -> pairs of A tiles.
 * An int4 chunk is unpacked once into a panel and every row sweeps over it. The tile unit and the vector
 * units work side by side: between tile products the kernel finishes rows of the previous pair (scales,
 * activation function, store), unpacks or prefetches the next chunk, one small piece per step.
 * With fp32 group scales the accumulators are emptied once per group instead of once per chunk.
 */
#ifndef KTC_KERNELS_GEMM_TILE_H
#define KTC_KERNELS_GEMM_TILE_H

#include "ktc/kernels/epilogue.h"
#include "ktc/kernels/unpack.h"

namespace ktc {

template <class S>
struct TileShape {
  static constexpr int64_t kRunBytes = S::kInteger && S::kGroupScale ? S::kRunK : 64; /* of one tile product */
  static constexpr int64_t kRunsPerStep = 64 / kRunBytes;
  static constexpr int64_t kGroupSteps = S::kGroupScale && S::kGroup > 64 ? S::kGroup / 64 : 1;
  static constexpr int64_t kChunkSteps = ceil_div(16, kGroupSteps) * kGroupSteps; /* 32 KB of B tiles */
  static constexpr int64_t kPairRows = 32;
  static constexpr int64_t kSuperRows = 512;
  static constexpr int64_t kCBytes = 4 * kTile; /* accumulators of one pair */

  static constexpr int64_t kPanelBytes = S::kFormat == KTC_INT4 ? kChunkSteps * 2 * kTile : 0;
  static constexpr int64_t kSumsBytes = kSuperRows / kPairRows * kCBytes;
  static constexpr int64_t kGroupBytes = S::kGroupScale ? 2 * kCBytes : 0;
  static constexpr int64_t scratch_bytes() { return 2 * kPanelBytes + kSumsBytes + kGroupBytes; }
};

/* A piece of one weight block: steps [begin, end) of block b. */
struct Chunk {
  int64_t b, begin, end;
};

template <class S, class V, class T>
class TileGemm {
  using Shape = TileShape<S>;
  using I = typename V::I;
  using F = typename V::F;

 public:
  TileGemm(const ktc_gemm_args& args, int epilogue) : a_(args), epilogue_(epilogue), k_(S::k(args.k)) {
    steps_ = S::steps(k_);
    groups_ = S::groups(k_);
    const int64_t chunks = ceil_div(steps_, Shape::kChunkSteps);
    chunk_steps_ = ceil_div(ceil_div(steps_, chunks), Shape::kGroupSteps) * Shape::kGroupSteps;
    uint8_t* p = static_cast<uint8_t*>(args.scratch);
    panel_[0] = p;
    panel_[1] = p + Shape::kPanelBytes;
    sums_ = p + 2 * Shape::kPanelBytes;
    group_[0] = sums_ + Shape::kSumsBytes;
    group_[1] = group_[0] + Shape::kCBytes;
  }

  void run() {
    if (Shape::kRunBytes != 64) t_.configure(Shape::kRunBytes);
    for (int64_t m = a_.m_begin; m < a_.m_end; m += Shape::kSuperRows) {
      rows(m, min64(m + Shape::kSuperRows, a_.m_end));
    }
    if (Shape::kRunBytes != 64) t_.configure(64);
  }

 private:
  /* Rows [m0, m1), all blocks. */
  void rows(int64_t m0, int64_t m1) {
    const int64_t pairs = ceil_div(m1 - m0, Shape::kPairRows);
    Chunk chunk{a_.block_begin, 0, min64(chunk_steps_, steps_)};
    int side = 0;
    if (S::kFormat == KTC_INT4) {
      for (int64_t s = chunk.begin; s < chunk.end; ++s) unpack(chunk, s - chunk.begin, panel_[0]);
    }
    while (chunk.b < a_.block_end) {
      const Chunk next = following(chunk);
      start_ahead(next, panel_[side ^ 1]);
      const uint8_t* b_tiles = S::kFormat == KTC_INT4 ? panel_[side] : block(chunk.b) + chunk.begin * 2 * kTile;
      for (int64_t p = 0; p < pairs; ++p) {
        /* This pair's share of the pieces of the next chunk. */
        ahead_end_ = ahead_total_ * (p + 1) / pairs;
        const int64_t m = m0 + p * Shape::kPairRows;
        uint8_t* sums = sums_ + p * Shape::kCBytes;
        if (m1 - m > kTileRows) {
          pair<2>(chunk, b_tiles, m, min64(m1 - m, Shape::kPairRows), sums);
        } else {
          pair<1>(chunk, b_tiles, m, m1 - m, sums);
        }
      }
      chunk = next;
      side ^= 1;
    }
    finish_pending();
  }

  const uint8_t* block(int64_t b) const { return a_.weight.tiles + b * S::block_bytes(k_); }

  Chunk following(const Chunk& c) const {
    if (c.end < steps_) return Chunk{c.b, c.end, min64(c.end + chunk_steps_, steps_)};
    return Chunk{c.b + 1, 0, min64(chunk_steps_, steps_)};
  }

  /* ---- tile products ---- */

  template <int MT>
  KTC_INLINE void zero_c() {
    t_.template zero<0>();
    t_.template zero<1>();
    if (MT == 2) {
      t_.template zero<2>();
      t_.template zero<3>();
    }
  }
  template <int MT>
  KTC_INLINE void load_c(const uint8_t* c) {
    t_.template load<0>(c);
    t_.template load<1>(c + kTile);
    if (MT == 2) {
      t_.template load<2>(c + 2 * kTile);
      t_.template load<3>(c + 3 * kTile);
    }
  }
  template <int MT>
  KTC_INLINE void store_c(uint8_t* c) {
    t_.template store<0>(c);
    t_.template store<1>(c + kTile);
    if (MT == 2) {
      t_.template store<2>(c + 2 * kTile);
      t_.template store<3>(c + 3 * kTile);
    }
  }
  template <int C, int A, int B>
  KTC_INLINE void dot() {
    if constexpr (S::kFormat == KTC_BF16) {
      t_.template dot_bf16<C, A, B>();
    } else {
      t_.template dot_su<C, A, B>();
    }
  }
  template <int MT>
  KTC_INLINE void product(const uint8_t* a0, const uint8_t* a1, const uint8_t* b) {
    t_.template load<6>(b);
    t_.template load<4>(a0);
    t_.template load<7>(b + kTile);
    dot<0, 4, 6>();
    dot<1, 4, 7>();
    if (MT == 2) {
      t_.template load<5>(a1);
      dot<2, 5, 6>();
      dot<3, 5, 7>();
    }
  }

  template <int MT>
  KTC_INLINE void pair(const Chunk& c, const uint8_t* b_tiles, int64_t m, int64_t rows, uint8_t* sums) {
    const uint8_t* a0 = a_.act.tiles + ((m / kTileRows) * steps_ + c.begin) * kTile;
    const uint8_t* a1 = MT == 2 ? a0 + steps_ * kTile : a0;
    const int64_t steps = c.end - c.begin;
    if (S::kGroupScale) finish_pending(); /* it may sit in the sums that the first group overwrites */
    start_side_work(steps);
    if constexpr (S::kGroupScale) {
      grouped<MT>(c, a0, a1, b_tiles, m, rows, reinterpret_cast<float*>(sums));
    } else {
      if (c.begin == 0) {
        zero_c<MT>();
      } else {
        load_c<MT>(sums);
      }
      for (int64_t s = 0; s < steps; ++s) {
        product<MT>(a0 + s * kTile, a1 + s * kTile, b_tiles + s * 2 * kTile);
        side_work();
      }
      finish_side_work();
      store_c<MT>(sums);
    }
    if (c.end == steps_) pending_ = Pending{c.b, m, rows, 0, sums};
  }

  /* fp32 group scales: products of one group, then sums += scale * (products - offset * sum of x). The
   * vector part of a group is done while the tiles work on the next one. */
  template <int MT>
  KTC_INLINE void grouped(const Chunk& c, const uint8_t* a0, const uint8_t* a1, const uint8_t* b_tiles, int64_t m,
                          int64_t rows, float* sums) {
    constexpr int64_t kGroup = S::kGroup ? S::kGroup : 64;
    constexpr int64_t kGroupRuns = kGroup / Shape::kRunBytes;
    const int64_t runs = (c.end - c.begin) * Shape::kRunsPerStep;
    int64_t g = c.begin * 64 / kGroup;
    int side = 0;
    int64_t done = 0; /* rows of the group before this one that are added */
    int64_t step = 0;
    for (int64_t run = 0; run < runs; ++g) {
      const int64_t end = min64(run + kGroupRuns, runs);
      const int64_t per_run = ceil_div(rows, end - run);
      zero_c<MT>();
      for (; run < end; ++run) {
        const int64_t s = run / Shape::kRunsPerStep, part = run % Shape::kRunsPerStep;
        const int64_t at = s * kTile + part * Shape::kRunBytes;
        product<MT>(a0 + at, a1 + at, b_tiles + s * 2 * kTile + part * Shape::kRunBytes / 4 * kRowBytes);
        if (step > 0) {
          const int64_t stop = min64(done + per_run, rows);
          for (; done < stop; ++done) add_row(group_[side ^ 1], m, c.b, g - 1, done, sums, c.begin == 0 && step == 1);
        }
        if (part == 0) side_work();
      }
      store_c<MT>(group_[side]);
      side ^= 1;
      done = 0;
      ++step;
    }
    for (; done < rows; ++done) add_row(group_[side ^ 1], m, c.b, g - 1, done, sums, c.begin == 0 && step == 1);
    finish_side_work();
  }
  KTC_NOINLINE void add_row(const uint8_t* products, int64_t m, int64_t b, int64_t g, int64_t row, float* sums,
                          bool first) {
    for (int h = 0; h < 2; ++h) {
      const int64_t at = ((row / kTileRows) * 2 + h) * kTile + (row % kTileRows) * kRowBytes;
      float* sum = sums + at / 4;
      const I acc = V::iload(reinterpret_cast<const int32_t*>(products + at));
      V::store(sum, add_group<S, V>(a_, m + row, b, g, groups_, h, acc, first ? V::zero() : V::load(sum)));
    }
  }

  /* ---- what the vector units do meanwhile ---- */

  /* Rows whose accumulators are complete but not yet written out. */
  struct Pending {
    int64_t b, m, rows, done;
    const uint8_t* sums;
  };

  KTC_NOINLINE void finish_row() {
    const int64_t row = pending_.done++;
    const uint8_t* c = pending_.sums + (row / kTileRows) * 2 * kTile + (row % kTileRows) * kRowBytes;
    const int64_t m = pending_.m + row;
    if constexpr (S::kGroupScale || !S::kInteger) {
      const F y0 = V::load(reinterpret_cast<const float*>(c));
      const F y1 = V::load(reinterpret_cast<const float*>(c + kTile));
      if constexpr (S::kInteger) {
        emit_grouped<S, V>(a_, epilogue_, m, pending_.b, y0, y1);
      } else {
        emit<V>(a_, epilogue_, m, pending_.b, y0, y1);
      }
    } else {
      emit_int<S, V>(a_, epilogue_, m, pending_.b, V::iload(reinterpret_cast<const int32_t*>(c)),
                     V::iload(reinterpret_cast<const int32_t*>(c + kTile)));
    }
  }
  KTC_INLINE void finish_pending() {
    while (pending_.done < pending_.rows) finish_row();
  }

  /* The next chunk, in tiles: int4 unpacks them, the others prefetch them. */
  void start_ahead(const Chunk& next, uint8_t* panel) {
    ahead_ = next;
    ahead_panel_ = panel;
    ahead_done_ = 0;
    ahead_total_ = next.b < a_.block_end ? (next.end - next.begin) * S::kTilesPerStep : 0;
  }
  KTC_NOINLINE void ahead_piece() {
    const int64_t i = ahead_done_++;
    if constexpr (S::kFormat == KTC_INT4) {
      unpack(ahead_, i, ahead_panel_);
    } else {
      const uint8_t* p = block(ahead_.b) + (ahead_.begin * S::kTilesPerStep + i) * kTile;
      for (int64_t line = 0; line < kTile; line += 64) V::prefetch_l2(p + line);
    }
  }
  KTC_INLINE void unpack(const Chunk& c, int64_t i, uint8_t* panel) {
    const uint8_t* mult = S::kMultiplier ? block_mult(a_, c.b, groups_) : nullptr;
    unpack_steps<S, V>(block(c.b), mult, c.begin + i, c.begin + i + 1, panel + i * 2 * kTile);
  }

  /* Spread the pending rows and this pair's share of the next chunk evenly over `steps` steps. */
  KTC_INLINE void start_side_work(int64_t steps) {
    side_steps_ = steps;
    side_rows_ = pending_.rows - pending_.done;
    side_pieces_ = ahead_end_ - ahead_done_;
    row_credit_ = piece_credit_ = 0;
  }
  KTC_INLINE void side_work() {
    for (row_credit_ += side_rows_; row_credit_ >= side_steps_; row_credit_ -= side_steps_) finish_row();
    for (piece_credit_ += side_pieces_; piece_credit_ >= side_steps_; piece_credit_ -= side_steps_) ahead_piece();
  }
  KTC_INLINE void finish_side_work() {
    finish_pending();
    while (ahead_done_ < ahead_end_) ahead_piece();
  }

  const ktc_gemm_args& a_;
  const int epilogue_;
  const int64_t k_;
  T t_;
  int64_t steps_, groups_, chunk_steps_;
  uint8_t *panel_[2], *sums_, *group_[2];
  Pending pending_{0, 0, 0, 0, nullptr};
  Chunk ahead_{0, 0, 0};
  uint8_t* ahead_panel_ = nullptr;
  int64_t ahead_done_ = 0, ahead_end_ = 0, ahead_total_ = 0;
  int64_t side_steps_ = 1, side_rows_ = 0, side_pieces_ = 0, row_credit_ = 0, piece_credit_ = 0;
};

template <class S, class V, class T>
KTC_NOINLINE void gemm_tile(const ktc_gemm_args& args, int epilogue) {
  TileGemm<S, V, T>(args, epilogue).run();
}

}  // namespace ktc
#endif  // KTC_KERNELS_GEMM_TILE_H
