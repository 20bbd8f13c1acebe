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

template <class S, class V, class T, int Epilogue>
class TileGemm {
  using Shape = TileShape<S>;

 public:
  explicit TileGemm(const ktc_gemm_args& args) : a_(args), k_(S::k(args.k)), stream_(args, k_) {
    steps_ = S::steps(k_);
    const int64_t most = Shape::chunk_steps(args.m_end - args.m_begin);
    chunks_ = ceil_div(steps_, most);
    chunk_steps_ = ceil_div(ceil_div(steps_, chunks_), Shape::kGroupSteps) * Shape::kGroupSteps;
    chunks_ = ceil_div(steps_, chunk_steps_);
    uint8_t* p = static_cast<uint8_t*>(args.scratch);
    for (int i = 0; i < 2; ++i) {
      panel_[i] = p + i * Shape::kPanelBytes;
      sums_[i] = p + 2 * Shape::kPanelBytes + i * Shape::kSumsBytes;
      group_[i] = p + 2 * (Shape::kPanelBytes + Shape::kSumsBytes) + i * Shape::kCBytes;
    }
  }

  void run() {
    if (Shape::kRunBytes != 64) t_.configure(Shape::kRunBytes);
    const int64_t at_once = Shape::rows_at_once(steps_);
    for (int64_t m = a_.m_begin; m < a_.m_end; m += at_once) rows(m, min64(m + at_once, a_.m_end));
    if (Shape::kRunBytes != 64) t_.configure(64);
  }

 private:
  /* Side work of one sweep (a pair of A tiles against a chunk): how much of each kind is due. */
  struct Due {
    Share rows, pieces, calls;
  };

  /* Rows [m0, m1), all blocks. */
  void rows(int64_t m0, int64_t m1) {
    const int64_t pairs = ceil_div(m1 - m0, Shape::kPairRows);
    const int64_t sweeps = chunks_ * pairs; /* of one block */
    Chunk chunk{a_.block_begin, 0, min64(chunk_steps_, steps_)};
    stream_ = WeightStream<S, V>(a_, k_);
    for (int64_t due = stream_.due(0); due > 0; --due) stream_.call();
    int64_t which = 0;
    if constexpr (S::kFormat == KTC_INT4) {
      fill_.start(a_, k_, chunk, panel_[0]);
      while (fill_.piece < fill_.pieces) fill_.fill_some();
    }
    end_ = RowEnd<S, V, Epilogue>{};
    end_.m0 = m0;
    zero_c();
    while (chunk.b < a_.block_end) {
      const Chunk next = following(chunk);
      uint8_t* const sums = sums_[chunk.b & 1];
      const int64_t at = ((next.b - a_.block_begin) * steps_ + next.begin) * S::kTilesPerStep * kTile;
      if constexpr (S::kFormat == KTC_INT4) fill_.start(a_, k_, next, panel_[which ^ 1]);
      const uint8_t* b_tiles = S::kFormat == KTC_INT4 ? panel_[which]
                                                      : a_.weight.tiles + chunk.b * S::block_bytes(k_) +
                                                            chunk.begin * S::kTilesPerStep * kTile;
      const bool back = backwards(chunk), next_back = backwards(next);
      for (int64_t i = 0; i < pairs; ++i) {
        const bool last = i + 1 == pairs;
        const int64_t p = back ? pairs - 1 - i : i;
        const int64_t then_p = !last ? (back ? p - 1 : p + 1) : next_back ? pairs - 1 : 0;
        const int64_t m = m0 + p * Shape::kPairRows, steps = chunk.end - chunk.begin;
        /* What the accumulators hold after this pair: the same sums, those of another pair, or zero. */
        const bool fresh = (last ? next : chunk).begin == 0;
        const bool stay = then_p == p && !fresh;
        const uint8_t* load = fresh ? nullptr : sums + then_p * Shape::kCBytes;
        const int64_t sweep = chunk.begin / chunk_steps_ * pairs + i + 1;
        const Due due{Share(end_.rows * sweep / sweeps - end_.row, steps),
                      Share(fill_.pieces * (i + 1) / pairs - fill_.piece, steps),
                      Share(ceil_div(stream_.due(at), pairs - i), 2 * steps)};
        if (m1 - m > kTileRows) {
          pair<2>(chunk, b_tiles, due, m, min64(m1 - m, Shape::kPairRows), sums + p * Shape::kCBytes, load,
                  stay);
        } else {
          pair<1>(chunk, b_tiles, due, m, m1 - m, sums + p * Shape::kCBytes, load, stay);
        }
      }
      if (next.begin == 0) { /* the block is complete */
        end_.sums = sums;
        end_.b = chunk.b;
        end_.rows = m1 - m0;
        end_.row = 0;
      }
      chunk = next;
      which ^= 1;
    }
    while (end_.row < end_.rows) end_.finish(a_);
  }

  /* Every other chunk of a block is swept backwards, so that the pair at the turn keeps its accumulators. */
  bool backwards(const Chunk& c) const { return c.begin / chunk_steps_ % 2 == 1; }
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
  /* Calls come between the tile loads: many at once would take the fill buffers from them. */
  template <int MT>
  KTC_INLINE void product(const uint8_t* a0, const uint8_t* a1, const uint8_t* b, WeightStream<S, V>& stream,
                          const Share& calls, int32_t s) {
    t_.template load<6>(b);
    t_.template load_stream<4>(a0);
    for (int32_t i = calls.at(2 * s); i > 0; --i) stream.call();
    dot<0, 4, 6>();
    if (MT == 2) {
      t_.template load_stream<5>(a1);
      dot<2, 5, 6>();
    }
    t_.template load<7>(b + kTile);
    for (int32_t i = calls.at(2 * s + 1); i > 0; --i) stream.call();
    dot<1, 4, 7>();
    if (MT == 2) dot<3, 5, 7>();
  }

  /* One pair of A tiles (or one tile) against one chunk; see `rows` for load and stay. */
  template <int MT>
  KTC_INLINE void pair(const Chunk& c, const uint8_t* b_tiles, const Due& due, int64_t m, int64_t rows,
                       uint8_t* sums, const uint8_t* load, bool stay) {
    const uint8_t* a0 = a_.act.tiles + ((m / kTileRows) * steps_ + c.begin) * kTile;
    const uint8_t* a1 = MT == 2 ? a0 + steps_ * kTile : a0;
    const int32_t steps = int32_t(c.end - c.begin);
    RowEnd<S, V, Epilogue> end = end_;
    PanelFill<S, V> fill = fill_;
    WeightStream<S, V> stream = stream_;
    if constexpr (S::kGroupScale) {
      grouped<MT>(c, a0, a1, b_tiles, due, m, rows, reinterpret_cast<float*>(sums), end, fill, stream);
    } else {
      for (int32_t s = 0; s < steps; ++s) {
        product<MT>(a0 + s * kTile, a1 + s * kTile, b_tiles + s * 2 * kTile, stream, due.calls, s);
        side(due, s, end, fill);
      }
      if (!stay) {
        exchange<0>(sums, load);
        exchange<1>(sums, load);
        exchange<2>(sums, load);
        exchange<3>(sums, load);
      }
    }
    end_ = end;
    fill_ = fill;
    stream_ = stream;
  }
  KTC_INLINE void side(const Due& due, int32_t s, RowEnd<S, V, Epilogue>& end, PanelFill<S, V>& fill) {
    if constexpr (S::kFormat == KTC_INT4) {
      for (int32_t i = due.pieces.at(s); i > 0; --i) fill.fill_some();
    }
    for (int32_t i = due.rows.at(s); i > 0; --i) end.finish(a_);
  }

  /* fp32 group scales: products of one group, then sums += scale * (products - offset * sum of x). The
   * vector part of a group is done while the tiles work on the next one. */
  template <int MT>
  KTC_INLINE void grouped(const Chunk& c, const uint8_t* a0, const uint8_t* a1, const uint8_t* b_tiles,
                          const Due& due, int64_t m, int64_t rows, float* sums, RowEnd<S, V, Epilogue>& end,
                          PanelFill<S, V>& fill, WeightStream<S, V>& stream) {
    constexpr int64_t kGroup = S::kGroup ? S::kGroup : 64;
    constexpr int64_t kGroupRuns = kGroup / Shape::kRunBytes;
    const int64_t runs = (c.end - c.begin) * Shape::kRunsPerStep;
    int64_t g = c.begin * 64 / kGroup;
    int which = 0;
    bool first = c.begin == 0; /* the group whose rows are being added is the first of the row */
    int64_t row = rows;        /* next row to add of the group before this one; rows = none left */
    for (int64_t run = 0; run < runs; ++g) {
      const int64_t stop_run = min64(run + kGroupRuns, runs);
      const int64_t per_run = ceil_div(rows, stop_run - run);
      for (; run < stop_run; ++run) {
        const int64_t s = run / Shape::kRunsPerStep, part = run % Shape::kRunsPerStep;
        const int64_t at = s * kTile + part * Shape::kRunBytes;
        product<MT>(a0 + at, a1 + at, b_tiles + s * 2 * kTile + part * Shape::kRunBytes / 4 * kRowBytes,
                    stream, part == 0 ? due.calls : Share(0, 1), int32_t(s));
        for (const int64_t stop = min64(row + per_run, rows); row < stop; ++row) {
          add_row(group_[which ^ 1], m, c.b, g - 1, row, sums, first);
        }
        if (part == 0) side(due, int32_t(s), end, fill);
      }
      if (g > c.begin * 64 / kGroup) first = false;
      exchange<0>(group_[which], nullptr);
      exchange<1>(group_[which], nullptr);
      exchange<2>(group_[which], nullptr);
      exchange<3>(group_[which], nullptr);
      which ^= 1;
      row = 0;
    }
    for (; row < rows; ++row) add_row(group_[which ^ 1], m, c.b, g - 1, row, sums, first);
  }
  /* sums[row] (+)= what one group contributes. */
  KTC_NOINLINE void add_row(const uint8_t* products, int64_t m, int64_t b, int64_t g, int64_t row,
                            float* sums, bool first) {
    for (int h = 0; h < 2; ++h) {
      const int64_t at = ((row / kTileRows) * 2 + h) * kTile + (row % kTileRows) * kRowBytes;
      float* sum = sums + at / 4;
      const typename V::I acc = V::iload(reinterpret_cast<const int32_t*>(products + at));
      V::store(sum,
               add_group<S, V>(a_, m + row, b, g, S::groups(k_), h, acc, first ? V::zero() : V::load(sum)));
    }
  }

  const ktc_gemm_args& a_;
  const int64_t k_;
  T t_;
  RowEnd<S, V, Epilogue> end_;
  PanelFill<S, V> fill_;
  WeightStream<S, V> stream_;
  int64_t steps_, chunk_steps_, chunks_;
  uint8_t *panel_[2], *sums_[2] /* [block % 2] */, *group_[2];
};

template <class S, class V, class T, int Epilogue>
KTC_NOINLINE void gemm_tile(const ktc_gemm_args& args) {
  TileGemm<S, V, T, Epilogue>(args).run();
}

}  // namespace ktc
#endif  // KTC_KERNELS_GEMM_TILE_H
