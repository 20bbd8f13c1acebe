/* GEMM on matrix tiles (AMX, or its emulation): many rows of activations.
 *
 * The inner product is a 2x2 outer product: two A tiles (32 rows) against the two B tiles of one 32-row
 * weight block, so each step loads 4 KB for 4 tile products. Loops, outside in:
 *   rows in groups that fit L2 -> weight blocks -> chunks of K whose B tiles stay in L1 -> pairs of A
 *   tiles, which stream past them from L2.
 * An int4 chunk is unpacked once into a panel and every row sweeps over it. The tile unit and the vector
 * units work side by side: between tile products the kernel does pieces of side work (side_work.h).
 * With fp32 group scales the accumulators are emptied once per group instead of once per chunk.
 */
#ifndef KTC_KERNELS_GEMM_TILE_H
#define KTC_KERNELS_GEMM_TILE_H

#include "ktc/kernels/side_work.h"

namespace ktc {

template <class S, class V, class T>
class TileGemm {
  using Shape = TileShape<S>;

 public:
  TileGemm(const ktc_gemm_args& args, int epilogue) : a_(args), side_(args, epilogue) {
    steps_ = S::steps(S::k(args.k));
    const int64_t most = Shape::chunk_steps(args.m_end - args.m_begin);
    const int64_t chunks = ceil_div(steps_, most);
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
    const int64_t at_once = Shape::rows_at_once(steps_);
    for (int64_t m = a_.m_begin; m < a_.m_end; m += at_once) rows(m, min64(m + at_once, a_.m_end));
    if (Shape::kRunBytes != 64) t_.configure(64);
  }

 private:
  /* Rows [m0, m1), all blocks. */
  void rows(int64_t m0, int64_t m1) {
    const int64_t pairs = ceil_div(m1 - m0, Shape::kPairRows);
    Chunk chunk{a_.block_begin, 0, min64(chunk_steps_, steps_)};
    int64_t which = 0;
    side_.start_rows(m0, m1, ceil_div(steps_, chunk_steps_), sums_);
    if (S::kFormat == KTC_INT4) side_.unpack_all(chunk, panel_[0]);
    zero_c();
    while (chunk.b < a_.block_end) {
      const Chunk next = following(chunk);
      side_.start_ahead(next, panel_[which ^ 1]);
      const uint8_t* b_tiles = S::kFormat == KTC_INT4
                                   ? panel_[which]
                                   : side_.block(chunk.b) + chunk.begin * S::kTilesPerStep * kTile;
      const bool back = backwards(chunk), next_back = backwards(next);
      for (int64_t i = 0; i < pairs; ++i) {
        side_.share_ahead(i + 1, pairs);
        const bool last = i + 1 == pairs;
        const int64_t p = back ? pairs - 1 - i : i;
        const int64_t then_p = !last ? (back ? p - 1 : p + 1) : next_back ? pairs - 1 : 0;
        const int64_t m = m0 + p * Shape::kPairRows;
        /* What the accumulators hold after this pair: the same sums, those of another pair, or zero. */
        const bool fresh = (last ? next : chunk).begin == 0;
        const bool stay = then_p == p && !fresh;
        const uint8_t* load = fresh ? nullptr : sums_ + then_p * Shape::kCBytes;
        if (m1 - m > kTileRows) {
          pair<2>(chunk, b_tiles, m, min64(m1 - m, Shape::kPairRows), sums_ + p * Shape::kCBytes, load, stay);
        } else {
          pair<1>(chunk, b_tiles, m, m1 - m, sums_ + p * Shape::kCBytes, load, stay);
        }
      }
      chunk = next;
      which ^= 1;
    }
    side_.finish_rows();
  }

  /* Every other chunk of a block is swept backwards, so that the pair at the turn keeps its accumulators;
   * not the last one, because rows are finished in their order. */
  bool backwards(const Chunk& c) const {
    return c.begin / chunk_steps_ % 2 == 1 && c.end < steps_ && c.b < a_.block_end;
  }
  Chunk following(const Chunk& c) const {
    if (c.end < steps_) return Chunk{c.b, c.end, min64(c.end + chunk_steps_, steps_)};
    return Chunk{c.b + 1, 0, min64(chunk_steps_, steps_)};
  }

  KTC_INLINE void zero_c() {
    t_.template zero<0>();
    t_.template zero<1>();
    t_.template zero<2>();
    t_.template zero<3>();
  }
  /* Store each accumulator and at once load its next contents, so that one drains while another works. */
  template <int C>
  KTC_INLINE void exchange(uint8_t* store, const uint8_t* load) {
    t_.template store<C>(store + C * kTile);
    if (load) {
      t_.template load<C>(load + C * kTile);
    } else {
      t_.template zero<C>();
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
    t_.template load_stream<4>(a0);
    t_.template load<7>(b + kTile);
    dot<0, 4, 6>();
    dot<1, 4, 7>();
    if (MT == 2) {
      t_.template load_stream<5>(a1);
      dot<2, 5, 6>();
      dot<3, 5, 7>();
    }
  }

  /* One pair of A tiles (or one tile) against one chunk; see `rows` for load and stay. */
  template <int MT>
  KTC_INLINE void pair(const Chunk& c, const uint8_t* b_tiles, int64_t m, int64_t rows, uint8_t* sums,
                       const uint8_t* load, bool stay) {
    const uint8_t* a0 = a_.act.tiles + ((m / kTileRows) * steps_ + c.begin) * kTile;
    const uint8_t* a1 = MT == 2 ? a0 + steps_ * kTile : a0;
    const int64_t steps = c.end - c.begin;
    if constexpr (S::kGroupScale) {
      if (c.begin == 0) side_.free_sums(c.b, m); /* the first group overwrites them */
      grouped<MT>(c, a0, a1, b_tiles, m, rows, reinterpret_cast<float*>(sums));
    } else {
      typename SideWork<S, V>::Pace pace = side_.pace(steps, c.end == steps_ ? rows : 0);
      for (int64_t s = 0; s < steps; ++s) {
        product<MT>(a0 + s * kTile, a1 + s * kTile, b_tiles + s * 2 * kTile);
        /* The sums to load next are in L2 by now: bring them closer, a few lines per step. */
        if (!stay && load && s < 16) {
          for (int64_t line = 0; line < 256; line += 64) V::prefetch(load + s * 256 + line);
        }
        side_.some(pace, m, c.b);
      }
      side_.finish_ahead();
      if (!stay) {
        side_.free_sums(c.b, m);
        exchange<0>(sums, load);
        exchange<1>(sums, load);
        exchange<2>(sums, load);
        exchange<3>(sums, load);
      }
    }
    if (c.end == steps_) side_.rows_ready(rows);
  }

  /* fp32 group scales: products of one group, then sums += scale * (products - offset * sum of x). The
   * vector part of a group is done while the tiles work on the next one. */
  template <int MT>
  KTC_INLINE void grouped(const Chunk& c, const uint8_t* a0, const uint8_t* a1, const uint8_t* b_tiles,
                          int64_t m, int64_t rows, float* sums) {
    constexpr int64_t kGroup = S::kGroup ? S::kGroup : 64;
    constexpr int64_t kGroupRuns = kGroup / Shape::kRunBytes;
    const int64_t runs = (c.end - c.begin) * Shape::kRunsPerStep;
    typename SideWork<S, V>::Pace pace = side_.pace(c.end - c.begin, 0);
    int64_t g = c.begin * 64 / kGroup;
    int which = 0;
    bool first = c.begin == 0; /* the group whose rows are being added is the first of the row */
    int64_t row = rows;        /* next row to add of the group before this one; rows = none left */
    for (int64_t run = 0; run < runs; ++g) {
      const int64_t end = min64(run + kGroupRuns, runs);
      const int64_t per_run = ceil_div(rows, end - run);
      for (; run < end; ++run) {
        const int64_t s = run / Shape::kRunsPerStep, part = run % Shape::kRunsPerStep;
        const int64_t at = s * kTile + part * Shape::kRunBytes;
        product<MT>(a0 + at, a1 + at, b_tiles + s * 2 * kTile + part * Shape::kRunBytes / 4 * kRowBytes);
        for (const int64_t stop = min64(row + per_run, rows); row < stop; ++row) {
          side_.add_row(group_[which ^ 1], m, c.b, g - 1, row, sums, first);
        }
        if (part == 0) side_.some(pace, m, c.b);
      }
      if (g > c.begin * 64 / kGroup) first = false;
      exchange<0>(group_[which], nullptr);
      exchange<1>(group_[which], nullptr);
      exchange<2>(group_[which], nullptr);
      exchange<3>(group_[which], nullptr);
      which ^= 1;
      row = 0;
    }
    for (; row < rows; ++row) side_.add_row(group_[which ^ 1], m, c.b, g - 1, row, sums, first);
    side_.finish_ahead();
  }

  const ktc_gemm_args& a_;
  SideWork<S, V> side_;
  T t_;
  int64_t steps_, chunk_steps_;
  uint8_t *panel_[2], *sums_, *group_[2];
};

template <class S, class V, class T>
KTC_NOINLINE void gemm_tile(const ktc_gemm_args& args, int epilogue) {
  TileGemm<S, V, T>(args, epilogue).run();
}

}  // namespace ktc
#endif  // KTC_KERNELS_GEMM_TILE_H
