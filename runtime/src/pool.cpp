#include "pool.h"

#include <sched.h>
#include <signal.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>

#include "cpu.h"

namespace ktc {
namespace {

constexpr int64_t kSpinNs = 30000;
// Some microseconds: threads that have just done a job let go of it soon, and a new job would allocate.
constexpr int kAcquireTries = 100;

std::atomic<unsigned> g_fork_generation{0};
void watch_forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { g_fork_generation.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
}

}  // namespace

Pool::Pool(const std::vector<std::vector<int>>& nodes, bool pin, bool caller_works)
    : alive_(nodes.size()), caller_works_(caller_works), caller_busy_(!caller_works) {
  if (nodes.empty()) throw std::invalid_argument("a pool needs at least one node");
  watch_forks();
  prepare_unwinder();
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
  if (inside_task_) throw std::logic_error("a task of the pool cannot submit to or wait for the pool");
}

Job* Pool::acquire() {
  check_not_forked();
  bool held = true;  // a free job was passed over because a thread still points to it
  for (int tries = 0; held && tries < kAcquireTries; ++tries) {
    held = false;
    for (Job* job = newest_.load(std::memory_order_acquire); job != nullptr; job = job->older_) {
      if (job->in_use_.load(std::memory_order_relaxed) ||
          job->in_use_.exchange(true, std::memory_order_acq_rel))
        continue;
      bool touched = false;
      for (const std::unique_ptr<Slot>& slot : slots_)
        touched = touched || slot->hazard.load(std::memory_order_seq_cst) == job ||
                  slot->ahead.load(std::memory_order_seq_cst) == job;
      if (!touched) return job;
      release(job);
      held = true;
    }
    if (held) __builtin_ia32_pause();
  }
  Job* const job = new Job(nodes());
  job->in_use_.store(true, std::memory_order_relaxed);
  job->older_ = newest_.load(std::memory_order_relaxed);
  while (!newest_.compare_exchange_weak(job->older_, job, std::memory_order_acq_rel)) {
  }
  return job;
}

void Pool::release(Job* job) { job->in_use_.store(false, std::memory_order_release); }

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
  if (advance(*job, -1, nullptr) == job->count_) {
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
    slot.awaited = job;
    while (!job->done_.load(std::memory_order_acquire)) {
      const uint32_t seen = event_.now();
      Job* head = pin_head(slot);
      if (head != nullptr) work_on(*head, slot);
      slot.hazard.store(nullptr, std::memory_order_release);
      if (head == nullptr && !job->done_.load(std::memory_order_acquire)) rest(slot, seen);
    }
    slot.own = nullptr;
    slot.awaited = nullptr;
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

}  // namespace ktc
