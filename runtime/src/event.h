// A counter that threads wait on: a short spin, then a futex. No lock, no lost wake-ups.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

namespace ktc {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

class Event {
 public:
  // Read this before checking the condition that `wait` waits for.
  uint32_t now() const { return count_.load(std::memory_order_seq_cst); }

  void notify() {
    count_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0)
      syscall(SYS_futex, word(), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  }

  // Returns once the count differs from `seen` (or spuriously). Spins for at most spin_ns.
  void wait(uint32_t seen, int64_t spin_ns) {
    if (!spin(seen, spin_ns)) sleep(seen);
  }
  // The first half of `wait`: whether the count differs.
  bool spin(uint32_t seen, int64_t spin_ns) const {
    if (spin_ns <= 0) return false;
    const int64_t deadline = now_ns() + spin_ns;
    do {
      for (int i = 0; i < 16; ++i) {
        if (now() != seen) return true;
        __builtin_ia32_pause();
      }
    } while (now_ns() < deadline);
    return false;
  }
  // The second half.
  void sleep(uint32_t seen) {
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    // The kernel compares the word again, so a notify between our check and the sleep is not lost.
    syscall(SYS_futex, word(), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
    sleepers_.fetch_sub(1, std::memory_order_seq_cst);
  }

 private:
  uint32_t* word() { return reinterpret_cast<uint32_t*>(&count_); }

  std::atomic<uint32_t> count_{0};
  std::atomic<int> sleepers_{0};
};

}  // namespace ktc
