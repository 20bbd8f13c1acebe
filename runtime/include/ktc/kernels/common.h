/* Words that every kernel shares: the Spec, layout arithmetic, argument checks.
 *
 * What this header is not: arithmetic on weights (gemm_*.h) or anything of one instruction set (isa/).
 * Letters as in abi.h: N output rows, K columns, M activation rows, b a block of 32 output rows.
 */
#ifndef KTC_KERNELS_COMMON_H
#define KTC_KERNELS_COMMON_H

#include <stdint.h>
#include <string.h>

#include "ktc/abi.h"
#include "ktc/codebook.h"

#define KTC_INLINE inline __attribute__((always_inline))
#define KTC_NOINLINE __attribute__((noinline))

namespace ktc {

constexpr int64_t kTile = 1024; /* bytes of a tile: 16 rows x 64 bytes */
constexpr int64_t kTileRows = 16;
constexpr int64_t kRowBytes = 64;
constexpr int64_t kBlockRows = 32;      /* output rows of a weight block */
constexpr int64_t kMaxIntegerK = 65536; /* 255 * 127 * K must fit an int32 */

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }

/* What a kernel is specialised for. K = 0 means "any multiple of 64, known at the call". */
template <int Format_, int Scale_, int Group_, int64_t K_>
struct Spec {
  static constexpr int kFormat = Format_;
  static constexpr int kScale = Scale_;
  static constexpr int64_t kGroup = Group_;
  static constexpr int64_t kK = K_;
  static constexpr bool kInteger = Format_ == KTC_INT8 || Format_ == KTC_INT4;
  static constexpr bool kGroupScale = Scale_ == KTC_SCALE_GROUP;
  static constexpr bool kCodebook = Scale_ == KTC_SCALE_CODEBOOK;
  /* weight.mult is there: multipliers, or selectors of the codebook */
  static constexpr bool kMultiplier = Scale_ == KTC_SCALE_INTEGER || kCodebook;
  static constexpr int64_t kMultBytes = kCodebook ? 16 : 32; /* of one group of a block */

  static constexpr int64_t kStepK = Format_ == KTC_FP32 ? 16 : Format_ == KTC_BF16 ? 32 : 64;
  static constexpr int64_t kTilesPerStep = Format_ == KTC_INT4 ? 1 : 2;
  /* A weight is stored as q + kOffset. Nibbles stay raw under fp32 group scales; a multiplier or the
   * codebook turns them into bytes around 128 first. */
  static constexpr int32_t kOffset = Format_ == KTC_INT4 && kGroupScale ? 8 : 128;
  static constexpr int64_t kLineK = kStepK / 16; /* columns of a line: 64 bytes for 16 output rows */
  /* Columns that certainly share a group, at most one step: what one inner loop may cover. */
  static constexpr int64_t kRunK = Group_ == 0 || Group_ % 64 == 0 ? 64 : Group_ % 32 == 0 ? 32 : 16;

  static_assert(K_ % 64 == 0, "K_pad is a multiple of 64");
  static_assert(Group_ % 64 == 0 || Group_ == 32 || Group_ == 16,
                "a group is 16, 32 or a multiple of 64 columns");
  static_assert(kInteger ? Scale_ != KTC_SCALE_NONE : Scale_ == KTC_SCALE_NONE, "scales belong to integers");
  static_assert((Group_ != 0) == (kGroupScale || kMultiplier), "group 0 means channel scales");
  static_assert(!kMultiplier || Format_ == KTC_INT4, "multipliers belong to int4");

  static_assert(Scale_ != KTC_SCALE_CHANNEL || Format_ == KTC_INT8, "channel scales belong to int8");

  static KTC_INLINE int64_t k(int64_t given) { return K_ ? K_ : given; }
  static KTC_INLINE int64_t steps(int64_t k) { return k / kStepK; }
  static KTC_INLINE int64_t groups(int64_t k) { return Group_ ? ceil_div(k, Group_ ? Group_ : 1) : 1; }
  static KTC_INLINE int64_t sum_groups(int64_t k) { return kGroupScale ? groups(k) : 1; }
  static KTC_INLINE int64_t block_bytes(int64_t k) { return steps(k) * kTilesPerStep * kTile; }
};

constexpr bool is_gated(int epilogue) { return epilogue >= KTC_SILU_MUL; }

/* First byte of activation row m: its next step is kTile further on. */
KTC_INLINE const uint8_t* act_row(const ktc_act& act, int64_t m, int64_t steps) {
  return act.tiles + (m / kTileRows) * steps * kTile + (m % kTileRows) * kRowBytes;
}

KTC_INLINE int32_t load_i32(const uint8_t* p) {
  int32_t v;
  memcpy(&v, p, sizeof v);
  return v;
}

/* For weights that stream past once, at every second line `p` of them: calls later ones, of which none lies
 * at `end` or beyond, where the weights of this call end: what lies there is another call's, perhaps another
 * thread's.
 *
 * Pages by turns: far ahead a line of each of two pages is called into L2, four pages in all: pages side by
 * side keep more of DRAM at work than one after the other. What has arrived there is called into L1 a page
 * ahead: fills of L1 that wait for DRAM would hold up the loads behind them. One core of a Xeon: 16.0 GB/s of
 * int4 and 16.5 of int8, where one call of each line, straight into L1, gives 14.7 and 15.7.
 *
 * In order, into L1 two pages ahead, four lines at a time: Zen 5 streams fastest like that. Two cores: 42 to
 * 53 GB/s, 95 to 100% of their limit, where pages by turns give 85% and single lines in order, of int8 and
 * bf16, 80%. */
template <class V>
KTC_INLINE void call_ahead(const uint8_t* p, const uint8_t* end) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(p);
  if constexpr (!V::kPagesByTurns) {
    constexpr int64_t kLines = 4;
    if (at % (kLines * kRowBytes) >= 2 * kRowBytes) return; /* weights begin at any line */
    const uint8_t* const later = p + 8192 < end ? p + 8192 : p;
    for (int64_t i = 0; i < kLines; ++i) V::prefetch(later + i * kRowBytes);
    return;
  }
  constexpr uintptr_t kPage = 4096, kWindow = 4 * kPage;
  const uintptr_t call = at % kWindow / (2 * kRowBytes);
  const uint8_t* far = reinterpret_cast<const uint8_t*>((at & ~(kWindow - 1)) + 2 * kWindow +
                                                        call / 2 * kRowBytes + call % 2 * (2 * kPage));
  V::prefetch_l2(far < end ? far : p);
  V::prefetch_l2(far + kPage < end ? far + kPage : p);
  V::prefetch(p + kPage);
  V::prefetch(p + kPage + kRowBytes);
}

/* Where the weights of a call end. */
template <class S>
KTC_INLINE const uint8_t* weights_end(const ktc_gemm_args& a, int64_t k) {
  return a.weight.tiles + a.block_end * S::block_bytes(k);
}

/* Refuses what a kernel could not survive; the runtime should never be refused. */
template <class S>
inline int check(const ktc_gemm_args* a, int epilogue) {
  if (!a || a->struct_size < sizeof(ktc_gemm_args) || a->flags != 0) return KTC_ERR_ARGS;
  if (a->k <= 0 || a->k % 64 != 0 || (S::kK != 0 && a->k != S::kK)) return KTC_ERR_ARGS;
  if (S::kInteger && !S::kGroupScale && a->k > kMaxIntegerK) return KTC_ERR_UNSUPPORTED;
  if (a->m_begin < 0 || a->m_begin % kTileRows != 0 || a->m_end < a->m_begin) return KTC_ERR_ARGS;
  if (a->block_begin < 0 || a->block_end < a->block_begin || a->n_out < 0) return KTC_ERR_ARGS;
  if (a->m_begin == a->m_end || a->block_begin == a->block_end) return KTC_OK;
  if (!a->act.tiles || !a->weight.tiles || !a->out) return KTC_ERR_ARGS;
  if (S::kInteger && (!a->act.scale || !a->act.sums || !a->weight.scale)) return KTC_ERR_ARGS;
  if (S::kMultiplier && !a->weight.mult) return KTC_ERR_ARGS;
  if (epilogue == KTC_SCATTER_ADD && (!a->row_index || !a->row_weight)) return KTC_ERR_ARGS;
  return KTC_OK;
}

}  // namespace ktc
#endif  // KTC_KERNELS_COMMON_H
