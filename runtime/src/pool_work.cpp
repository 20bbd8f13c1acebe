// What the threads of the pool do: take tasks, end phases and jobs, begin the next one, rest.
#include <cxxabi.h>
#include <sched.h>

#include <stdexcept>

#include "pool.h"

namespace ktc {
namespace {

std::exception_ptr ended() {
  return std::make_exception_ptr(
      std::runtime_error("a worker thread was ended in the middle of its work; the others go on without it"));
}

}  // namespace

thread_local bool Pool::inside_task_ = false;

// A thread that is ended unwinds by the C library's unwinder and catches here with the one that is linked in
// statically, whose tables are made at its first own exception: without one before, it aborts.
void Pool::prepare_unwinder() {
  static const bool ready = [] {
    try {
      throw 0;
    } catch (int) {
      return true;
    }
  }();
  static_cast<void>(ready);
}

// ---- the queue ----------------------------------------------------------------------------------

// Any number of threads push. The one that finds the queue empty makes its job the head.
void Pool::push(Job& job) {
  job.queued_.store(nullptr, std::memory_order_relaxed);
  Job* const before = tail_.exchange(&job, std::memory_order_seq_cst);
  (before != nullptr ? before->queued_ : head_).store(&job, std::memory_order_seq_cst);
}

// Takes the head off: one thread does, see finish.
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

// The thread of `slot`, at work on `job`, is being ended: nobody may wait for it any more. The job whose task
// it was in has failed; that may be the one behind.
void Pool::lose(Slot& slot, Job& job) {
  inside_task_ = false;
  const int left = alive_[slot.node].fetch_sub(1, std::memory_order_seq_cst) - 1;
  while (submitting_.load(std::memory_order_seq_cst) != 0) sched_yield();
  released_.notify();  // who waits without helping may have to help now
  warn("a worker of node " + std::to_string(slot.node) + " was ended; the others do its work");
  if (job.schedule_ == Schedule::kDynamic && job.failed()) work_on(job, slot);  // only counts
  // Nobody is left to take this node's tasks, and submit takes no more: the jobs that are queued fail too.
  while (left == 0) {
    Job* next = pin_head(slot);
    if (next == nullptr) break;
    next->fail(ended());
    work_on(*next, slot);
  }
  slot.hazard.store(nullptr, std::memory_order_release);
  slot.ahead.store(nullptr, std::memory_order_release);
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
    for (;;) {
      const uint32_t seen = event_.now();
      if (job.phase_.load(std::memory_order_acquire) != phase) break;
      if (!run_ahead(job, slot)) rest(slot, seen);
    }
  }
}

// `job` is pinned, and this thread finds no task in it. Runs one of the job behind it, if there is one that
// this thread is ready for, and if `job` will need this thread no more: no shared work is to come in it, and
// nobody waits for this thread to come back when it is done.
bool Pool::run_ahead(Job& job, Slot& slot) {
  if (&job == slot.awaited || job.schedule_ == Schedule::kStatic ||
      !job.ending_.load(std::memory_order_acquire))
    return false;
  Job* const next = job.queued_.load(std::memory_order_seq_cst);
  if (next == nullptr) return false;
  slot.ahead.store(next, std::memory_order_seq_cst);
  // Jobs leave the queue in order: while this one is not done nobody may reuse that one.
  bool ran = false;
  if (!job.done_.load(std::memory_order_seq_cst) && next->schedule_ == Schedule::kDynamic &&
      next->lib_ == slot.lib && next->scratch_bytes_ <= slot.scratch.size()) {
    const int phase = next->phase_.load(std::memory_order_acquire);
    if (phase < next->count_) {
      Job::Counter& counter = next->counters_[phase * next->nodes_ + slot.node];
      const int64_t index = counter.next.fetch_add(1, std::memory_order_relaxed);
      ran = index < counter.count;
      if (ran) run_task(*next, phase, slot, index);
    }
  }
  slot.ahead.store(nullptr, std::memory_order_release);
  return ran;
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
    inside_task_ = true;
    try {
      p.run(p.context, Task{index, slot.node, slot.scratch.data()});
    } catch (abi::__forced_unwind&) {
      job.fail(ended());
      end_task(job, phase, slot);
      throw;
    } catch (...) {
      job.fail(std::current_exception());
    }
    inside_task_ = false;
  }
  if (from != 0) job.busy_.fetch_add(now_ns() - from, std::memory_order_relaxed);
  end_task(job, phase, slot);
}

void Pool::end_task(Job& job, int phase, Slot& slot) {
  if (job.phases_[phase].remaining.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  if (advance(job, phase, &slot) == job.count_) finish(job, slot);
  event_.notify();
}

// Runs the serial phases after `from`, then publishes and returns the next one that has shared work. Without
// a slot the job is not queued yet.
int Pool::advance(Job& job, int from, Slot* slot) {
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
      if (slot != nullptr) {  // in a worker: the job ends here
        job.phase_.store(job.count_, std::memory_order_seq_cst);
        finish(job, *slot);
        event_.notify();
      }
      throw;
    } catch (...) {
      job.fail(std::current_exception());
    }
  }
  bool more = false;  // what a later serial phase will set is not known
  for (int later = next + 1; later < job.count_; ++later) {
    const Job::Phase& phase = job.phases_[later];
    more = more || (!phase.serial && phase.remaining.load(std::memory_order_relaxed) > 0);
  }
  job.ending_.store(!more, std::memory_order_relaxed);
  job.phase_.store(next, std::memory_order_seq_cst);
  return next;
}

// All of the job has ended. Takes it off the queue if it is the head, and those behind it that have ended
// already; otherwise whoever takes the head off does.
void Pool::finish(Job& job, Slot& slot) {
  job.finished_.store(true, std::memory_order_seq_cst);
  for (;;) {
    Job* const head = head_.load(std::memory_order_seq_cst);
    slot.ahead.store(head, std::memory_order_seq_cst);
    if (head != head_.load(std::memory_order_seq_cst)) continue;
    // Who takes a job off looks at the next one afterwards, and we looked at the head after our own was
    // finished: one of us sees it.
    if (head == nullptr || !head->finished_.load(std::memory_order_seq_cst)) break;
    if (head->leaving_.exchange(true, std::memory_order_acq_rel)) break;
    if (head->observed_ >= 0) {
      const std::lock_guard<std::mutex> lock(mutex_);
      record(*head);
    }
    pop(*head);
    head->done_.store(true, std::memory_order_seq_cst);  // the owner may reuse it once nobody points to it
    released_.notify();
  }
  slot.ahead.store(nullptr, std::memory_order_release);
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
