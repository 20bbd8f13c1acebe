#include "job.h"

#include <algorithm>

namespace ktc {

void Job::reset(const ktc_kernel_lib* lib, Schedule schedule, int64_t scratch_bytes) {
  lib_ = lib;
  schedule_ = schedule;
  scratch_bytes_ = scratch_bytes;
  count_ = 0;
  phase_.store(0, std::memory_order_relaxed);
  for (std::atomic<bool>* flag : {&ending_, &finished_, &leaving_, &done_, &failed_})
    flag->store(false, std::memory_order_relaxed);
  error_ = nullptr;
}

int Job::add_phase(TaskFunction run, void* context) {
  if (count_ == capacity_) {
    const int grown = std::max(8, capacity_ * 2);
    std::unique_ptr<Phase[]> phases(new Phase[grown]);
    std::unique_ptr<Counter[]> counters(new Counter[static_cast<size_t>(grown) * nodes_]);
    for (int p = 0; p < count_; ++p) {
      phases[p].run = phases_[p].run;
      phases[p].context = phases_[p].context;
      phases[p].serial = phases_[p].serial;
      phases[p].remaining.store(phases_[p].remaining.load(std::memory_order_relaxed),
                                std::memory_order_relaxed);
    }
    for (int i = 0; i < count_ * nodes_; ++i) counters[i].count = counters_[i].count;
    phases_ = std::move(phases);
    counters_ = std::move(counters);
    capacity_ = grown;
  }
  Phase& phase = phases_[count_];
  phase.run = run;
  phase.context = context;
  phase.serial = false;
  phase.remaining.store(0, std::memory_order_relaxed);
  for (int node = 0; node < nodes_; ++node) {
    Counter& counter = counters_[count_ * nodes_ + node];
    counter.next.store(0, std::memory_order_relaxed);
    counter.count = 0;
  }
  return count_++;
}

void Job::set_tasks(int phase, int node, int64_t count) {
  Counter& counter = counters_[phase * nodes_ + node];
  phases_[phase].remaining.fetch_add(count - counter.count, std::memory_order_relaxed);
  counter.count = count;
}

void Job::fail(std::exception_ptr error) {
  const std::lock_guard<std::mutex> lock(error_mutex_);
  if (!error_) error_ = std::move(error);
  failed_.store(true, std::memory_order_relaxed);
}

}  // namespace ktc
