// A CPU for the thread that works as the pool's first: not one that a worker is pinned to.
//
// The caller's thread is the caller's own and is not pinned. If a call finds it on a worker's CPU, that
// worker, which has no other place to go, waits until the scheduler's next balancing, and the caller does
// nearly all of a call by itself: on two CPUs a call of a millisecond then takes two. It gets there when a
// worker wakes it, since schedulers like to put both on one CPU: so it does not sleep in a call unpinned.
#pragma once

#include <pthread.h>
#include <sched.h>

#include <vector>

#include "cpu.h"

namespace ktc {

// While it lives the thread stays on `cpu`, if it was found on one of `taken` or has slept; then it may go
// anywhere again.
class OwnCpu {
 public:
  // taken: [CPU] whether another thread is pinned there. Where the move is forbidden nothing changes.
  OwnCpu(int cpu, const std::vector<bool>& taken) : cpu_(taken.empty() ? -1 : cpu) {
    if (cpu_ < 0) return;
    const int here = sched_getcpu();
    if (here >= 0 && here != cpu && static_cast<size_t>(here) < taken.size() && taken[here]) move();
  }
  // Before sleeping: no worker's wake-up moves the thread to that worker's CPU.
  void stay() {
    if (!moved_ && cpu_ >= 0) move();
  }
  ~OwnCpu() {
    if (moved_) sched_setaffinity(0, sizeof before_, &before_);
  }
  OwnCpu(const OwnCpu&) = delete;
  OwnCpu& operator=(const OwnCpu&) = delete;

 private:
  void move() {
    // The kernel refuses a mask too short for its CPUs; the caller then stays where it is.
    if (cpu_ >= CPU_SETSIZE || sched_getaffinity(0, sizeof before_, &before_) != 0) return;
    if (!CPU_ISSET(cpu_, &before_)) return;  // somebody keeps the thread elsewhere
    moved_ = pin_thread(pthread_self(), cpu_) == 0;
  }

  int cpu_;
  cpu_set_t before_;
  bool moved_ = false;
};

}  // namespace ktc
