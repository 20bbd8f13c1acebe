#include "pool.h"

#include <cxxabi.h>
#include <sched.h>
#include <signal.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "cpu.h"

namespace ktc {
namespace {

constexpr int64_t kSpinNs = 30000;

std::atomic<unsigned> g_fork_generation{0};
thread_local bool t_inside_task = false;

void watch_forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { g_fork_generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
}

std::exception_ptr ended() {
  return std::make_exception_ptr(
      std::runtime_error("a worker thread was ended in the middle of its work; the others go on without it"));
}

}  // namespace

Pool::Pool(const std::vector<std::vector<int>>& nodes, bool pin, bool caller_works)
    : alive_(nodes.size()), caller_works_(caller_works), caller_busy_(!caller_works) {
  if (nodes.empty()) throw std::invalid_argument("a pool needs at least one node");
  watch_forks();
  fork_generation_ = g_fork_generation.load(std::memory_order_relaxed);
  for (size_t node = 0; node < nodes.size(); ++node) {
    if (nodes[node].empty())
      throw std::invalid_argument("node " + std::to_string(node) + " of the pool has no CPUs");
    node_threads_.push_back(static_cast<int>(nodes[node].size()));
    alive_[node].store(node_threads_.back(), std::memory_order_relaxed);
    for (size_t i = 0; i < nodes[node].size(); ++i) {
      auto slot = std::make_unique<Slot>();
      slot->index = static_cast<int>(i);
      slot->node = static_cast<int>(node);
      slot->cpu = nodes[node][i];
      slot->pool = this;
      slots_.push_back(std::move(slot));
    }
  }
  spin_ns_ = slots_.size() > usable_cpus().size() ? 0 : kSpinNs;
  start_workers(pin);
}

void Pool::start_workers(bool pin) {
  // Signals such as Ctrl-C belong to the caller's threads.
  sigset_t all, old;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &old);
  size_t started = caller_works_ ? 1 : 0;
  int error = 0;
  for (; started < slots_.size(); ++started) {
    Slot& slot = *slots_[started];
    error = pthread_create(&slot.thread, nullptr, &Pool::worker_main, &slot);
    if (error != 0) break;
    char name[16];
    std::snprintf(name, sizeof name, "ktc-%d.%d", slot.node, slot.index);
    pthread_setname_np(slot.thread, name);
    if (!pin) continue;
    const int rc = pin_thread(slot.thread, slot.cpu);
    if (rc == 0) {
      if (pinned_.size() <= static_cast<size_t>(slot.cpu)) pinned_.resize(slot.cpu + 1);
      pinned_[slot.cpu] = true;
    } else {
      warn("cannot pin a worker of node " + std::to_string(slot.node) + " to CPU " +
           std::to_string(slot.cpu) + ": " + std::strerror(rc) + "; it runs unpinned");
    }
  }
  pthread_sigmask(SIG_SETMASK, &old, nullptr);
  if (error != 0) {
    stop_workers(started);
    throw std::runtime_error(std::string("cannot start worker thread: ") + std::strerror(error));
  }
}

void Pool::stop_workers(size_t started) {
  stop_.store(true, std::memory_order_seq_cst);
  event_.notify();
  for (size_t i = caller_works_ ? 1 : 0; i < started; ++i) pthread_join(slots_[i]->thread, nullptr);
}

Pool::~Pool() {
  // After fork() the child has no workers to stop.
  if (fork_generation_ == g_fork_generation.load(std::memory_order_relaxed)) stop_workers(slots_.size());
  for (Job* job = newest_.load(std::memory_order_relaxed); job != nullptr;) {
    Job* const older = job->older_;
    delete job;
    job = older;
  }
}

std::vector<std::string> Pool::warnings() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return warnings_;
}

void Pool::warn(const std::string& text) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const std::string& known : warnings_)
    if (known == text) return;
  warnings_.push_back(text);
}

void Pool::check_not_forked() const {
  if (fork_generation_ != g_fork_generation.load(std::memory_order_relaxed))
    throw std::runtime_error("this thread pool was made before fork(); make the pool in the child process");
  if (t_inside_task) throw std::logic_error("a task of the pool cannot submit to or wait for the pool");
}

Job* Pool::acquire() {
  check_not_forked();
  for (Job* job = newest_.load(std::memory_order_acquire); job != nullptr; job = job->older_) {
    if (job->in_use_.load(std::memory_order_relaxed) ||
        job->in_use_.exchange(true, std::memory_order_acq_rel))
      continue;
    bool touched = false;
    for (const std::unique_ptr<Slot>& slot : slots_)
      touched = touched || slot->hazard.load(std::memory_order_seq_cst) == job;
    if (!touched) return job;
    release(job);
  }
  Job* const job = new Job(nodes());
  job->in_use_.store(true, std::memory_order_relaxed);
  job->older_ = newest_.load(std::memory_order_relaxed);
  while (!newest_.compare_exchange_weak(job->older_, job, std::memory_order_acq_rel)) {
  }
  return job;
}

void Pool::release(Job* job) { job->in_use_.store(false, std::memory_order_release); }

// ---- the queue ----------------------------------------------------------------------------------

// Any number of threads push. The one that finds the queue empty makes its job the head.
void Pool::push(Job& job) {
  job.queued_.store(nullptr, std::memory_order_relaxed);
  Job* const before = tail_.exchange(&job, std::memory_order_seq_cst);
  (before != nullptr ? before->queued_ : head_).store(&job, std::memory_order_seq_cst);
}

// Takes the head off: only the thread that finished it does.
void Pool::pop(Job& job) {
  Job* next = job.queued_.load(std::memory_order_seq_cst);
  if (next == nullptr) {
    head_.store(nullptr, std::memory_order_seq_cst);  // first: whoever pushes next sets it
    Job* last = &job;
    if (tail_.compare_exchange_strong(last, nullptr, std::memory_order_seq_cst)) return;
    // A thread is between its two writes: it becomes the next one any moment.
    while ((next = job.queued_.load(std::memory_order_seq_cst)) == nullptr) sched_yield();
  }
  head_.store(next, std::memory_order_seq_cst);
}

// ---- working ------------------------------------------------------------------------------------

void Pool::submit(Job* job) {
  check_not_forked();
  job->observed_ = -1;
  if (observing_) {
    job->begun_.store(0, std::memory_order_relaxed);
    job->busy_.store(0, std::memory_order_relaxed);
    const std::lock_guard<std::mutex> lock(mutex_);
    job->observed_ = static_cast<int64_t>(observed_.size());
    observed_.push_back({now_ns(), 0, 0, 0});
  }
  if (advance(*job, -1) == job->count_) {
    if (job->observed_ >= 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      record(*job);
    }
    job->done_.store(true, std::memory_order_release);
    return;
  }
  // `lose` waits until nobody is in here: it sees the job, or we see that it took a thread away.
  submitting_.fetch_add(1, std::memory_order_seq_cst);
  int dead = -1;
  for (int node = 0; node < nodes(); ++node) {
    const int alive = alive_[node].load(std::memory_order_seq_cst);
    if (alive == 0) dead = node;
    if (alive < node_threads_[node]) job->schedule_ = Schedule::kDynamic;  // nobody does a lost one's share
  }
  if (dead < 0) push(*job);
  submitting_.fetch_sub(1, std::memory_order_seq_cst);
  if (dead >= 0)
    throw std::runtime_error("every worker thread of node " + std::to_string(dead) +
                             " was ended; the process must be started anew");
  event_.notify();
}

void Pool::wait(Job* job, bool help) {
  check_not_forked();
  help = help || job->schedule_ == Schedule::kStatic;
  while (!job->done_.load(std::memory_order_acquire)) {
    const uint32_t released = released_.now();
    help = help || (caller_works_ && alive_[0].load(std::memory_order_seq_cst) == 1);
    const bool mine = help && !caller_busy_.exchange(true, std::memory_order_acq_rel);
    if (!mine) {  // another thread works in slot 0; it or the workers will get to our job
      if (!job->done_.load(std::memory_order_acquire))
        released_.wait(released, help || !caller_works_ ? 0 : spin_ns_);
      continue;
    }
    Slot& slot = *slots_[0];
    OwnCpu own(slot.cpu, pinned_);
    slot.own = &own;
    while (!job->done_.load(std::memory_order_acquire)) {
      const uint32_t seen = event_.now();
      Job* head = pin_head(slot);
      if (head != nullptr) work_on(*head, slot);
      slot.hazard.store(nullptr, std::memory_order_release);
      if (head == nullptr && !job->done_.load(std::memory_order_acquire)) rest(slot, seen);
    }
    slot.own = nullptr;
    leave_library(slot);  // other code on this thread may use tiles too
    caller_busy_.store(false, std::memory_order_seq_cst);
    released_.notify();
  }
  if (job->failed()) {
    std::exception_ptr error;
    {
      const std::lock_guard<std::mutex> lock(job->error_mutex_);
      error = std::move(job->error_);  // the waiter's alone: whoever reuses the job must not share it
    }
    if (!error) throw std::logic_error("a failed job was waited for twice");
    std::rethrow_exception(error);
  }
}

void* Pool::worker_main(void* argument) {
  Slot& slot = *static_cast<Slot*>(argument);
  slot.pool->work(slot);
  return nullptr;
}

void Pool::work(Slot& slot) {
  for (;;) {
    const uint32_t seen = event_.now();
    if (stop_.load(std::memory_order_seq_cst)) break;
    Job* job = pin_head(slot);
    if (job != nullptr) {
      try {
        work_on(*job, slot);
      } catch (abi::__forced_unwind&) {
        lose(slot, *job);
        throw;
      }
    }
    slot.hazard.store(nullptr, std::memory_order_release);
    if (job == nullptr) rest(slot, seen);
  }
  leave_library(slot);
}

// The thread of `slot` is being ended, and `job` has failed for it: nobody may wait for this thread any more.
void Pool::lose(Slot& slot, Job& job) {
  t_inside_task = false;
  const int left = alive_[slot.node].fetch_sub(1, std::memory_order_seq_cst) - 1;
  while (submitting_.load(std::memory_order_seq_cst) != 0) sched_yield();
  released_.notify();  // who waits without helping may have to help now
  warn("a worker of node " + std::to_string(slot.node) + " was ended; the others do its work");
  if (job.schedule_ == Schedule::kDynamic) work_on(job, slot);  // only counts: the job has failed
  // Nobody is left to take this node's tasks, and submit takes no more: the jobs that are queued fail too.
  while (left == 0) {
    Job* next = pin_head(slot);
    if (next == nullptr) break;
    next->fail(ended());
    work_on(*next, slot);
  }
  slot.hazard.store(nullptr, std::memory_order_release);
}

// The head of the queue, marked as in use by this thread. Null if there is none.
Job* Pool::pin_head(Slot& slot) {
  for (;;) {
    Job* job = head_.load(std::memory_order_seq_cst);
    slot.hazard.store(job, std::memory_order_seq_cst);
    if (job == head_.load(std::memory_order_seq_cst)) return job;
  }
}

// Stays until the job's last phase has ended (or is about to).
void Pool::work_on(Job& job, Slot& slot) {
  if (job.lib_ != nullptr && !enter_library(job.lib_, slot)) {
    job.fail(std::make_exception_ptr(std::runtime_error(
        std::string("the kernel library's thread_init failed (variant ") + job.lib_->variant + ")")));
  }
  if (slot.scratch.size() < job.scratch_bytes_) {
    try {
      slot.scratch = Mapping(job.scratch_bytes_);
    } catch (...) {
      job.fail(std::current_exception());
    }
  }
  for (;;) {
    const uint32_t seen = event_.now();
    const int phase = job.phase_.load(std::memory_order_acquire);
    if (phase == job.count_) return;
    Job::Counter& counter = job.counters_[phase * job.nodes_ + slot.node];
    if (job.schedule_ == Schedule::kDynamic) {
      for (;;) {
        const int64_t index = counter.next.fetch_add(1, std::memory_order_relaxed);
        if (index >= counter.count) break;
        run_task(job, phase, slot, index);
      }
    } else {
      // Each thread meets each phase once: it leaves this loop only when the phase has changed.
      const int64_t threads = node_threads_[slot.node];
      const int64_t end = counter.count * (slot.index + 1) / threads;
      int64_t index = counter.count * slot.index / threads;
      try {
        for (; index < end; ++index) run_task(job, phase, slot, index);
      } catch (abi::__forced_unwind&) {
        while (++index < end) run_task(job, phase, slot, index);  // only counts: the job has failed
        throw;
      }
    }
    uint32_t before = seen;
    while (job.phase_.load(std::memory_order_acquire) == phase) {
      rest(slot, before);
      before = event_.now();
    }
  }
}

// Until something has happened since `seen`.
void Pool::rest(Slot& slot, uint32_t seen) {
  if (event_.spin(seen, spin_ns_)) return;
  if (slot.own != nullptr) slot.own->stay();
  event_.sleep(seen);
}

void Pool::run_task(Job& job, int phase, Slot& slot, int64_t index) {
  Job::Phase& p = job.phases_[phase];
  const int64_t from = job.observed_ >= 0 ? now_ns() : 0;
  if (from != 0) {
    int64_t none = 0;
    job.begun_.compare_exchange_strong(none, from, std::memory_order_relaxed);
  }
  if (!job.failed()) {
    t_inside_task = true;
    try {
      p.run(p.context, Task{index, slot.node, slot.scratch.data()});
    } catch (abi::__forced_unwind&) {
      job.fail(ended());
      end_task(job, phase);
      throw;
    } catch (...) {
      job.fail(std::current_exception());
    }
    t_inside_task = false;
  }
  if (from != 0) job.busy_.fetch_add(now_ns() - from, std::memory_order_relaxed);
  end_task(job, phase);
}

void Pool::end_task(Job& job, int phase) {
  if (job.phases_[phase].remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (advance(job, phase) == job.count_) finish(job);
  event_.notify();
}

// Runs the serial phases after `from`, then publishes and returns the next one that has shared work.
int Pool::advance(Job& job, int from) {
  int next = from + 1;
  for (; next < job.count_; ++next) {
    Job::Phase& phase = job.phases_[next];
    if (!phase.serial && !job.failed() && phase.remaining.load(std::memory_order_relaxed) > 0) break;
    if (job.failed()) continue;
    try {
      for (int node = 0; node < job.nodes_; ++node) {
        const int64_t count = job.counters_[next * job.nodes_ + node].count;
        for (int64_t index = 0; index < count; ++index) phase.run(phase.context, Task{index, node, nullptr});
      }
    } catch (abi::__forced_unwind&) {
      job.fail(ended());
      if (from >= 0) {  // in a worker: the job ends here
        job.phase_.store(job.count_, std::memory_order_seq_cst);
        finish(job);
        event_.notify();
      }
      throw;
    } catch (...) {
      job.fail(std::current_exception());
    }
  }
  job.phase_.store(next, std::memory_order_seq_cst);
  return next;
}

void Pool::finish(Job& job) {
  if (job.observed_ >= 0) {
    const std::lock_guard<std::mutex> lock(mutex_);
    record(job);
  }
  pop(job);
  job.done_.store(true, std::memory_order_release);  // the owner may reuse the job from here on
  released_.notify();
}

// Under the mutex, before the job counts as done.
void Pool::record(const Job& job) {
  JobTimes& times = observed_[static_cast<size_t>(job.observed_)];
  times.done = now_ns();
  times.begun = job.begun_.load(std::memory_order_relaxed);
  if (times.begun == 0)
    times.begun = times.submitted;  // serial phases only: done by the thread that submitted
  times.busy = job.busy_.load(std::memory_order_relaxed);
}

void Pool::observe(bool on) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!idle()) throw std::logic_error("jobs are under way: the pool cannot start observing");
  observing_ = on;
  observed_.clear();
}

size_t Pool::observed() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return observed_.size();
}

std::vector<Pool::JobTimes> Pool::job_times() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return observed_;
}

bool Pool::enter_library(const ktc_kernel_lib* lib, Slot& slot) {
  if (slot.lib == lib) return true;
  leave_library(slot);
  if (lib->thread_init != nullptr && lib->thread_init() != KTC_OK) return false;
  slot.lib = lib;
  return true;
}

void Pool::leave_library(Slot& slot) {
  if (slot.lib != nullptr && slot.lib->thread_fini != nullptr) slot.lib->thread_fini();
  slot.lib = nullptr;
}

}  // namespace ktc
