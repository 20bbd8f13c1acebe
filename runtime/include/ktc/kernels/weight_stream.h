/* Calls weights from DRAM into L2 while others are multiplied.
 *
 * Lines are called in the order of four pages side by side (windows of 16 KB). One page after the other, a
 * line waits for the one before it in the same DRAM page and keeps its fill buffer for so long; the tile
 * loads that come from L2 need the same buffers. On one core with AMX, 96 rows against int8 weights from
 * DRAM: 48 ns per four tile products instead of 67.
 *
 * Where pages by turns are not the best for one row (common.h), lines are called in order for up to 16 rows
 * too: two cores with Zen 5, bf16, 16 rows 47 GB/s instead of 41; but 32 rows 24 instead of 27.
 */
#ifndef KTC_KERNELS_WEIGHT_STREAM_H
#define KTC_KERNELS_WEIGHT_STREAM_H

#include "ktc/kernels/common.h"

namespace ktc {

/* Spreads a number of pieces of work evenly over a number of steps. */
class Pace {
 public:
  KTC_INLINE void set(int64_t total, int64_t steps) {
    rate_ = total > 0 ? uint32_t((uint64_t(total) * kOne + uint64_t(steps) - 1) / uint64_t(steps)) : 0;
    owed_ = 0;
  }
  /* Pieces of this step; over all steps `total` or a little more. */
  KTC_INLINE int32_t due() {
    owed_ += rate_;
    const int32_t n = int32_t(owed_ / kOne);
    owed_ %= kOne;
    return n;
  }

 private:
  static constexpr uint32_t kOne = 1 << 16;
  uint32_t rate_ = 0, owed_ = 0;
};

template <class S, class V>
class WeightStream {
  static constexpr int64_t kPage = 4096, kPages = 4, kWindow = kPages * kPage;
  static constexpr int64_t kCallBytes = kPages * kRowBytes; /* of one call: a line of each page */
  /* Calls run this far ahead of use: the window in use and a whole one. */
  static constexpr int64_t kAhead = 2 * kWindow;

 public:
  /* The weights of a task: blocks [block_begin, block_end). */
  KTC_INLINE WeightStream(const ktc_gemm_args& a, int64_t k)
      : in_order_(!V::kPagesByTurns && a.m_end - a.m_begin <= 16) {
    const int64_t block_bytes = S::block_bytes(k);
    next_ = a.weight.tiles + a.block_begin * block_bytes;
    calls_ = ceil_div((a.block_end - a.block_begin) * block_bytes, kWindow) * (kWindow / kCallBytes);
    if constexpr (S::kMultiplier) {
      const int64_t mult_bytes = S::groups(k) * S::kMultBytes;
      next_mult_ = a.weight.mult + a.block_begin * mult_bytes;
      mult_step_ = mult_bytes * kCallBytes / block_bytes;
    }
  }

  /* From here on calls are those that must be made before byte `at` of the task's weights is used. Returns
   * how many are left to make. */
  KTC_INLINE int64_t aim(int64_t at) {
    limit_ = min64(calls_, (at + kAhead) / kCallBytes);
    return limit_ - called_;
  }
  /* The calls before anything is used. */
  KTC_INLINE void begin() {
    for (int64_t left = aim(0); left > 0; --left) call();
  }
  /* Aims, and deals what is left to make out over so many calls of `step`. */
  KTC_INLINE void pace(int64_t at, int64_t steps) { pace_.set(aim(at), steps); }
  KTC_INLINE void step() {
    for (int32_t n = pace_.due(); n > 0; --n) call();
  }
  /* Prefetches may point past the end: they never fault. */
  KTC_INLINE void call() {
    if (called_ >= limit_) return;
    if constexpr (S::kMultiplier) {
      V::prefetch_l2(next_mult_);
      next_mult_ += mult_step_;
    }
    ++called_;
    if (!V::kPagesByTurns && in_order_) {
      for (int64_t i = 0; i < kPages; ++i) V::prefetch_l2(next_ + i * kRowBytes);
      next_ += kCallBytes;
      return;
    }
    for (int64_t i = 0; i < kPages; ++i) V::prefetch_l2(next_ + i * kPage);
    next_ += kRowBytes;
    if ((called_ & (kPage / kRowBytes - 1)) == 0) next_ += kWindow - kPage;
  }

 private:
  const bool in_order_;
  const uint8_t* next_;
  const uint8_t* next_mult_ = nullptr;
  int64_t mult_step_ = 0;
  int64_t called_ = 0, limit_ = 0, calls_;
  Pace pace_;
};

}  // namespace ktc
#endif  // KTC_KERNELS_WEIGHT_STREAM_H
