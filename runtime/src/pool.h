// The one thread pool: nodes of pinned workers that work through jobs in order of submission. While the last
// tasks of a job run, threads that find none left begin the next job; jobs count as done in order all the
// same.
//
// The thread that waits for a job works too, as the first thread of node 0, so a pool of T CPUs
// starts T - 1 workers; with `caller_works` off it starts T, and whoever waits only waits: a thread that
// stands for a device. A worker that is ended from outside (pthread_exit, pthread_cancel) fails the job that
// it was at, and the others go on without it. Idle threads spin for tens of microseconds, then sleep; they do
// not spin at all when there are more threads than CPUs.
#pragma once

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "event.h"
#include "job.h"
#include "own_cpu.h"

namespace ktc {

class Pool {
 public:
  // nodes[i] = CPU ids of node i; a CPU may appear several times (emulated nodes).
  // Throws std::invalid_argument for no nodes or an empty one, std::runtime_error if a thread cannot start.
  Pool(const std::vector<std::vector<int>>& nodes, bool pin, bool caller_works = true);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int nodes() const { return static_cast<int>(node_threads_.size()); }
  int threads() const { return static_cast<int>(slots_.size()); }
  // Nothing is queued or under way, at this moment.
  bool idle() const { return head_.load(std::memory_order_relaxed) == nullptr; }
  bool caller_works() const { return caller_works_; }
  int node_threads(int node) const { return node_threads_[node]; }
  std::vector<std::string> warnings() const;
  void warn(const std::string& text);

  // A job whose arena may hold memory from earlier use. The pool owns it; give it back with release.
  Job* acquire();
  void release(Job* job);

  // Starts the job. It may finish before `wait`, but a pool without workers only works in `wait`.
  // Throws std::runtime_error in a process forked after the pool was made, and if a node has no worker left.
  void submit(Job* job);
  // Works until the job is done; rethrows the first exception of its tasks. Without `help` the caller only
  // waits, unless nobody else would do the first thread's share (no worker on node 0, or a static schedule).
  void wait(Job* job, bool help = true);

  // One job on the monotonic clock, ns: handed over, first shared task begun (perhaps while the job before it
  // ran its last ones), done; and the sum over all threads of the time inside its tasks.
  struct JobTimes {
    int64_t submitted = 0, begun = 0, done = 0, busy = 0;
  };
  // Starts a new record of jobs in order of submission, or stops it. No job may be under way.
  void observe(bool on);
  size_t observed() const;
  std::vector<JobTimes> job_times() const;

 private:
  struct alignas(64) Slot {
    int index = 0;  // within its node
    int node = 0;
    int cpu = -1;
    Pool* pool = nullptr;
    pthread_t thread{};
    std::atomic<Job*> hazard{nullptr};  // a job this thread may touch: it must not be reused
    std::atomic<Job*> ahead{nullptr};   // another one, behind it in the queue
    const ktc_kernel_lib* lib = nullptr;
    OwnCpu* own = nullptr;         // of the caller, while one works here
    const Job* awaited = nullptr;  // by that caller
    Mapping scratch;
  };

  static void* worker_main(void* slot);
  void start_workers(bool pin);
  void stop_workers(size_t started);
  void work(Slot& slot);
  Job* pin_head(Slot& slot);
  void work_on(Job& job, Slot& slot);
  void rest(Slot& slot, uint32_t seen);
  void run_task(Job& job, int phase, Slot& slot, int64_t index);
  bool run_ahead(Job& job, Slot& slot);
  void end_task(Job& job, int phase, Slot& slot);
  int advance(Job& job, int from, Slot* slot);
  void push(Job& job);
  void pop(Job& job);
  void finish(Job& job, Slot& slot);
  void lose(Slot& slot, Job& job);
  void record(const Job& job);
  static bool enter_library(const ktc_kernel_lib* lib, Slot& slot);
  static void leave_library(Slot& slot);
  void check_not_forked() const;

  static void prepare_unwinder();

  static thread_local bool inside_task_;

  std::vector<int> node_threads_;
  std::vector<std::atomic<int>> alive_;       // [node] threads that have not been ended
  std::atomic<int> submitting_{0};            // threads between looking at alive_ and having queued their job
  std::vector<std::unique_ptr<Slot>> slots_;  // slots_[0] belongs to whoever waits, if callers work
  std::vector<bool> pinned_;                  // [CPU] a worker is pinned there
  int64_t spin_ns_ = 0;
  unsigned fork_generation_;

  mutable std::mutex mutex_;  // warnings_, observed_; never held while working
  std::vector<std::string> warnings_;
  std::vector<JobTimes> observed_;
  const bool caller_works_;
  bool observing_ = false;
  std::atomic<bool> caller_busy_;      // somebody works in slot 0: always so if that is a worker
  std::atomic<Job*> newest_{nullptr};  // of all jobs, linked by Job::older_
  // The queue is linked by Job::queued_. A job that is finished leaves it once it is the head.
  std::atomic<Job*> head_{nullptr}, tail_{nullptr};
  std::atomic<bool> stop_{false};
  Event event_;     // a job arrived, a phase or a job ended
  Event released_;  // slot 0 is free again, or a job ended
};

}  // namespace ktc
