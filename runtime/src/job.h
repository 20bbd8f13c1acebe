// A job: phases of independent tasks that the pool's threads work through together.
//
// A phase starts when every task of the one before it has ended. Its tasks belong to nodes: threads
// of a node take them from that node's counter only, because that is where the weights are.
// A job says what to do; the pool (pool.h) says who does it and when.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <vector>

#include "arena.h"
#include "ktc/abi.h"

namespace ktc {

struct Task {
  int64_t index;  // within the phase and node
  int node;
  void* scratch;  // thread-local, 64-byte aligned, Job::scratch_bytes; null in serial phases
};

// Throws to fail the job: its remaining tasks are skipped and the exception reaches the waiting caller.
using TaskFunction = void (*)(void* context, const Task& task);

enum class Schedule { kDynamic, kStatic };

class Job {
 public:
  // ---- built by the owner before Pool::submit ----
  void reset(const ktc_kernel_lib* lib, Schedule schedule, int64_t scratch_bytes);
  // Returns the phase's index. Tasks are set with set_tasks, before submit or by an earlier serial phase.
  int add_phase(TaskFunction run, void* context);
  // `serial`: too little work to share; the thread that ended the phase before runs it alone.
  void set_tasks(int phase, int node, int64_t count);
  void set_serial(int phase, bool serial) { phases_[phase].serial = serial; }
  Arena arena;

  int64_t tasks(int phase, int node) const { return counters_[phase * nodes_ + node].count; }

 private:
  friend class Pool;

  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
    int64_t count = 0;
  };
  struct alignas(64) Phase {
    TaskFunction run = nullptr;
    void* context = nullptr;
    bool serial = false;
    std::atomic<int64_t> remaining{0};
  };

  void fail(std::exception_ptr error);
  bool failed() const { return failed_.load(std::memory_order_relaxed); }

  explicit Job(int nodes) : nodes_(nodes) {}

  const int nodes_;
  const ktc_kernel_lib* lib_ = nullptr;
  Schedule schedule_ = Schedule::kDynamic;
  int64_t scratch_bytes_ = 0;
  int count_ = 0;  // phases in use
  int capacity_ = 0;
  std::unique_ptr<Phase[]> phases_;
  std::unique_ptr<Counter[]> counters_;  // [phase][node]
  std::atomic<int> phase_{0};            // the one being worked on; count_ when all are done
  std::atomic<bool> ending_{false};      // no shared work follows that phase, as far as is known
  std::atomic<bool> finished_{false};    // all phases have ended
  std::atomic<bool> leaving_{false};     // somebody takes it off the queue
  std::atomic<bool> done_{false};        // it is off the queue
  std::atomic<bool> failed_{false};
  std::mutex error_mutex_;
  std::exception_ptr error_;
  std::atomic<bool> in_use_{false};
  Job* older_ = nullptr;               // every job of the pool, newest first; set once
  std::atomic<Job*> queued_{nullptr};  // the job that was submitted after this one, while this one is queued
  // For Pool::observe: the job's place in the record, or -1; when it began (0: not yet) and the time in its
  // tasks.
  int64_t observed_ = -1;
  std::atomic<int64_t> begun_{0}, busy_{0};
};

}  // namespace ktc
