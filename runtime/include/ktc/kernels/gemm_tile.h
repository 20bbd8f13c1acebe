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
  explicit TileGemm(const ktc_gemm_args& args) : a_(args), k_(S::k(args.k)) {
    steps_ = S::steps(k_);
    at_once_ = Shape::rows_at_once(args.m_end - args.m_begin, steps_);
    const int64_t most = Shape::chunk_steps(at_once_);
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
    for (int64_t m = a_.m_begin; m < a_.m_end; m += at_once_) rows(m, min64(m + at_once_, a_.m_end));
    if (Shape::kRunBytes != 64) t_.configure(64);
  }

 private:
  using End = RowEnd<S, V, Epilogue>;
  using Fill = PanelFill<S, V>;
  using Stream = WeightStream<S, V>;
  /* The tiles of one step of a sweep. */
  struct Tiles {
    const uint8_t *a0, *a1, *b;
    KTC_INLINE Tiles at(int64_t step) const {
      return Tiles{a0 + step * kTile, a1 + step * kTile, b + step * 2 * kTile};
    }
  };

  /* Rows [m0, m1), all blocks. Side work is in local variables: what can be reached through `this` would be
   * written and read again around every tile instruction. */
  void rows(int64_t m0, int64_t m1) {
    const int64_t pairs = ceil_div(m1 - m0, Shape::kPairRows);
    Chunk chunk{a_.block_begin, 0, min64(chunk_steps_, steps_)};
    Stream stream(a_, k_);
    stream.begin();
    int64_t which = 0;
    Fill fill;
    if constexpr (S::kFormat == KTC_INT4) {
      fill.start(a_, k_, chunk, panel_[0], 1);
      fill.rest();
    }
    End end(a_);
    zero_c();
    if constexpr (!S::kGroupScale) load(tiles(chunk, m0, m1, chunk_tiles(chunk, which)));
    while (chunk.b < a_.block_end) {
      const Chunk next = following(chunk);
      uint8_t* const sums = sums_[chunk.b & 1];
      const int64_t steps = chunk.end - chunk.begin;
      const int64_t at = ((next.b - a_.block_begin) * steps_ + next.begin) * S::kTilesPerStep * kTile;
      stream.pace(at, 2 * steps * pairs);
      if constexpr (S::kFormat == KTC_INT4) fill.start(a_, k_, next, panel_[which ^ 1], steps * pairs);
      const uint8_t* b_tiles = chunk_tiles(chunk, which);
      const uint8_t* next_tiles = next.b < a_.block_end ? chunk_tiles(next, which ^ 1) : b_tiles;
      const bool back = backwards(chunk), next_back = backwards(next);
      for (int64_t i = 0; i < pairs; ++i) {
        const bool last = i + 1 == pairs;
        const int64_t p = back ? pairs - 1 - i : i;
        const int64_t then_p = !last ? (back ? p - 1 : p + 1) : next_back ? pairs - 1 : 0;
        const int64_t m = m0 + p * Shape::kPairRows;
        /* What the accumulators hold after this pair: the same sums, those of another pair, or zero. */
        const bool fresh = (last ? next : chunk).begin == 0;
        const bool stay = then_p == p && !fresh;
        const uint8_t* load = fresh ? nullptr : sums + then_p * Shape::kCBytes;
        const int64_t then_m = m0 + then_p * Shape::kPairRows;
        const Tiles now = tiles(chunk, m, m1, b_tiles);
        const Tiles then = tiles(last ? next : chunk, then_m, m1, last ? next_tiles : b_tiles);
        uint8_t* const store = sums + p * Shape::kCBytes;
        if constexpr (S::kGroupScale) {
          float* const to = reinterpret_cast<float*>(store);
          if (two(m, m1)) {
            grouped<2>(chunk, now, m, min64(m1 - m, Shape::kPairRows), to, end, fill, stream);
          } else {
            grouped<1>(chunk, now, m, m1 - m, to, end, fill, stream);
          }
        } else {
          if (two(m, m1)) {
            sweep<2>(steps, now, then, end, fill, stream);
          } else {
            sweep<1>(steps, now, then, end, fill, stream);
          }
          if (!stay) {
            exchange<0>(store, load);
            exchange<1>(store, load);
            exchange<2>(store, load);
            exchange<3>(store, load);
          }
        }
      }
      if (next.begin == 0) { /* the block is complete */
        end.rest(a_);
        end.start(a_, sums, chunk.b, m0, m1, steps_ * pairs);
      }
      chunk = next;
      which ^= 1;
    }
    end.rest(a_);
    end.done();
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
  bool two(int64_t m, int64_t m1) const { return m1 - m > kTileRows; }
  Tiles tiles(const Chunk& c, int64_t m, int64_t m1, const uint8_t* b) const {
    const uint8_t* a0 = a_.act.tiles + ((m / kTileRows) * steps_ + c.begin) * kTile;
    return Tiles{a0, two(m, m1) ? a0 + steps_ * kTile : a0, b};
  }
  /* B tiles of a chunk. */
  const uint8_t* chunk_tiles(const Chunk& c, int64_t which) const {
    if (S::kFormat == KTC_INT4) return panel_[which];
    return a_.weight.tiles + c.b * S::block_bytes(k_) + c.begin * S::kTilesPerStep * kTile;
  }
  KTC_INLINE void load(const Tiles& t) {
    t_.template load_stream<4>(t.a0);
    t_.template load<6>(t.b);
    t_.template load_stream<5>(t.a1);
    t_.template load<7>(t.b + kTile);
  }
  /* The products of the tiles that are loaded, between them the loads of the next step's (a load that stands
   * behind the product that waits for it would start too late), and the side work of a step. */
  template <int MT>
  KTC_INLINE void products(const Tiles& next, End& end, Fill& fill, Stream& stream) {
    dot<0, 4, 6>();
    end.template slot<0>(a_);
    if (MT == 2) {
      dot<1, 4, 7>();
      t_.template load_stream<4>(next.a0);
      stream.step();
    }
    /* Before any load from the next panel: a chunk may be a single step. */
    if constexpr (S::kFormat == KTC_INT4) fill.step();
    if (MT == 2) {
      end.template slot<1>(a_);
      dot<2, 5, 6>();
      t_.template load<6>(next.b);
      end.template slot<2>(a_);
      dot<3, 5, 7>();
      t_.template load_stream<5>(next.a1);
    } else {
      t_.template load<6>(next.b);
      stream.step();
      end.template slot<1>(a_);
      dot<1, 4, 7>();
      t_.template load_stream<4>(next.a0);
      end.template slot<2>(a_);
    }
    stream.step();
    t_.template load<7>(next.b + kTile);
    end.template slot<3>(a_);
  }
  /* One pair of A tiles (or one tile) against one chunk, whose first tiles are loaded; `then`: the first
   * tiles of the next sweep. */
  template <int MT>
  KTC_INLINE void sweep(int64_t steps, const Tiles& now, const Tiles& then, End& end, Fill& fill,
                        Stream& stream) {
    for (int64_t s = 1; s < steps; ++s) products<MT>(now.at(s), end, fill, stream);
    products<MT>(then, end, fill, stream);
    if (MT == 1) t_.template load_stream<5>(then.a1);
  }

  /* Loads and products of one run of a group (fp32 group scales). */
  template <int MT>
  KTC_INLINE void product(const Tiles& at) {
    t_.template load<6>(at.b);
    t_.template load_stream<4>(at.a0);
    dot<0, 4, 6>();
    if (MT == 2) {
      t_.template load_stream<5>(at.a1);
      dot<2, 5, 6>();
    }
    t_.template load<7>(at.b + kTile);
    dot<1, 4, 7>();
    if (MT == 2) dot<3, 5, 7>();
  }
  /* fp32 group scales: products of one group, then sums += scale * (products - offset * sum of x). The
   * vector part of a group is done while the tiles work on the next one. */
  template <int MT>
  KTC_INLINE void grouped(const Chunk& c, const Tiles& now, int64_t m, int64_t rows, float* sums, End& end,
                          Fill& fill, Stream& stream) {
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
        product<MT>(
            Tiles{now.a0 + at, now.a1 + at, now.b + s * 2 * kTile + part * Shape::kRunBytes / 4 * kRowBytes});
        for (const int64_t stop = min64(row + per_run, rows); row < stop; ++row) {
          add_row(group_[which ^ 1], m, c.b, g - 1, row, sums, first);
        }
        if (part == 0) {
          stream.step();
          stream.step();
          end.template slot<0>(a_);
          end.template slot<1>(a_);
          end.template slot<2>(a_);
          end.template slot<3>(a_);
          if constexpr (S::kFormat == KTC_INT4) fill.step();
        }
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
  int64_t steps_, chunk_steps_, chunks_;
  int64_t at_once_; /* rows */
  uint8_t *panel_[2], *sums_[2] /* [block % 2] */, *group_[2];
};

template <class S, class V, class T, int Epilogue>
KTC_NOINLINE void gemm_tile(const ktc_gemm_args& args) {
  TileGemm<S, V, T, Epilogue>(args).run();
}

}  // namespace ktc
#endif  // KTC_KERNELS_GEMM_TILE_H
