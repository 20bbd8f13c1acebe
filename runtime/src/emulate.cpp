#include "emulate.h"

#include <pthread.h>
#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>

namespace ktc::emulate {
namespace {

constexpr int64_t kMostSpin = 60000;

// A device does not wait for the CPU's scheduler, so the thread that stands for it goes before the workers.
// It sleeps nearly all the time. Without the right to do so it runs as it is; the lateness is in the moments.
class Realtime {
 public:
  Realtime() {
    if (pthread_getschedparam(pthread_self(), &policy_, &before_) != 0) return;
    slack_ = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    sched_param wanted{};
    const bool already = policy_ == SCHED_FIFO || policy_ == SCHED_RR;  // and then so are the workers
    wanted.sched_priority = already ? std::min(before_.sched_priority + 1, sched_get_priority_max(SCHED_FIFO))
                                    : sched_get_priority_min(SCHED_FIFO);
    on_ = pthread_setschedparam(pthread_self(), SCHED_FIFO, &wanted) == 0;
  }
  ~Realtime() {
    if (slack_ > 0) prctl(PR_SET_TIMERSLACK, slack_, 0, 0, 0);
    if (on_) pthread_setschedparam(pthread_self(), policy_, &before_);
  }
  Realtime(const Realtime&) = delete;
  Realtime& operator=(const Realtime&) = delete;
  bool on() const { return on_; }

 private:
  int policy_ = SCHED_OTHER, slack_ = 0;
  sched_param before_{};
  bool on_ = false;
};

class Observation {
 public:
  explicit Observation(Pool& pool) : pool_(pool) { pool_.observe(true); }
  ~Observation() { pool_.observe(false); }
  Observation(const Observation&) = delete;
  Observation& operator=(const Observation&) = delete;

 private:
  Pool& pool_;
};

int64_t thread_ns() {
  timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec;
}

std::invalid_argument bad(size_t block, const std::string& why) {
  return std::invalid_argument("emulated lane: MoE block " + std::to_string(block) + " " + why);
}

}  // namespace

Lane::Lane(std::shared_ptr<graph::Executor> executor, std::shared_ptr<Pool> pool, std::vector<Block> blocks)
    : executor_(std::move(executor)), pool_(std::move(pool)), blocks_(std::move(blocks)) {
  if (pool_->caller_works())
    throw std::invalid_argument("emulated lane: the pool's callers work, so the device would run experts");
  int64_t last = -1;
  for (size_t b = 0; b < blocks_.size(); ++b) {
    const Block& block = blocks_[b];
    if (block.submit <= last || block.collect <= block.submit ||
        block.collect >= static_cast<int64_t>(executor_->nodes()))
      throw bad(b, "does not follow the one before it in the program");
    if (block.top_k < 1 || block.hidden < 1) throw bad(b, "has no experts");
    last = block.collect;
  }
  set_times(std::vector<Times>(blocks_.size()), 0);
  sink_.resize(static_cast<size_t>(executor_->options().vocab));
}

void Lane::set_times(std::vector<Times> times, int64_t tail) {
  if (times.size() != blocks_.size())
    throw std::invalid_argument("emulated lane: times of " + std::to_string(times.size()) +
                                " MoE blocks, the program has " + std::to_string(blocks_.size()));
  for (size_t b = 0; b < times.size(); ++b)
    if (times[b].before < 0 || times[b].between < 0 || times[b].after < 0)
      throw bad(b, "has a negative time");
  if (tail < 0) throw std::invalid_argument("emulated lane: the last operators have a negative time");
  times_ = std::move(times);
  tail_ = tail;
}

int64_t Lane::record(int64_t id, int64_t position, float* logits) {
  std::vector<Routed> routed(blocks_.size());
  record_ = &routed;
  run(Mode::kRecord, id, position, logits);
  records_.push_back(std::move(routed));
  return recorded() - 1;
}

void Lane::begin_replay(int64_t number) {
  if (number < 0 || number >= recorded())
    throw std::out_of_range("emulated lane: step " + std::to_string(number) + " was not recorded");
  record_ = &records_[static_cast<size_t>(number)];
  replay_ = Replay{};
  replay_.blocks.resize(blocks_.size());
  outputs_.resize(blocks_.size());
  for (size_t b = 0; b < blocks_.size(); ++b) outputs_[b].resize(static_cast<size_t>(blocks_[b].hidden));
}

Replay Lane::replay(int64_t number) {
  begin_replay(number);
  {
    const Observation observation(*pool_);
    const Realtime priority;
    replay_.realtime = priority.on();
    const int64_t cpu = thread_ns();
    now_ = now_ns();
    run(Mode::kReplay, 0, 0, sink_.data());
    now_ += tail_;
    sleep_until(now_);
    replay_.end = now_;
    replay_.lane_cpu = thread_ns() - cpu;
    replay_.jobs = pool_->job_times();
  }
  for (size_t b = 0; b < blocks_.size(); ++b)
    if (std::memcmp(outputs_[b].data(), (*record_)[b].y.data(), outputs_[b].size() * sizeof(float)) != 0)
      replay_.differing.push_back(static_cast<int64_t>(b));
  return std::move(replay_);
}

std::vector<int64_t> Lane::time_jobs(int64_t number) {
  begin_replay(number);
  const Observation observation(*pool_);
  {
    const Realtime priority;  // or what is submitted second might come late
    run(Mode::kJobs, 0, 0, sink_.data());
  }
  const std::vector<Pool::JobTimes> jobs = pool_->job_times();
  std::vector<int64_t> out;
  size_t taken = 0;
  int64_t from = jobs.at(0).begun;
  for (const Moments& m : replay_.blocks) {
    taken += static_cast<size_t>(m.jobs);
    const int64_t done = jobs.at(taken - 1).done;
    out.push_back(done - from);
    from = done;
  }
  return out;
}

void Lane::run(Mode mode, int64_t id, int64_t position, float* logits) {
  mode_ = mode;
  block_ = 0;
  executor_->set_hook(this);
  try {
    executor_->step(&id, 1, position, true, 1, logits);
    collect_behind();
  } catch (...) {
    executor_->set_hook(nullptr);
    while (!behind_.empty()) {
      try {
        collect_behind();
      } catch (...) {  // the first error is the one that is told
      }
    }
    throw;
  }
  executor_->set_hook(nullptr);
}

bool Lane::before(size_t index, const graph::Step& step) {
  const bool recording = mode_ == Mode::kRecord;
  if (block_ == blocks_.size()) return recording;
  const Block& block = blocks_[block_];
  const auto at = static_cast<int64_t>(index);
  if (at != block.submit && at != block.collect) return recording;
  Routed& routed = (*record_)[block_];
  const auto k = static_cast<size_t>(block.top_k), hidden = static_cast<size_t>(block.hidden);
  if (recording) {
    if (at == block.collect) return true;
    routed.x.assign(step.at(block.x), step.at(block.x) + hidden);
    routed.weights.assign(step.at(block.weights), step.at(block.weights) + k);
    routed.ids.assign(step.at<int64_t>(block.ids), step.at<int64_t>(block.ids) + k);
    return true;
  }
  Moments& m = replay_.blocks[block_];
  if (mode_ == Mode::kJobs) {
    if (at == block.submit) {
      hand_over(step);
      return true;
    }
    collect_behind();
    take_tickets();
    ++block_;
    return false;
  }
  if (at == block.submit) {
    m.begin = now_;
    m.submit_due = now_ + times_[block_].before;
    sleep_until(m.submit_due);
    m.submit_begin = now_ns();
    hand_over(step);
  } else {
    m.collect_due = m.submit_end + times_[block_].between;
    sleep_until(m.collect_due);
    m.collect_begin = now_ns();
  }
  return true;
}

void Lane::after(size_t index, const graph::Step& step) {
  if (block_ == blocks_.size()) return;
  const Block& block = blocks_[block_];
  const auto at = static_cast<int64_t>(index);
  if (mode_ == Mode::kRecord) {
    if (at != block.collect) return;
    (*record_)[block_].y.assign(step.at(block.y), step.at(block.y) + block.hidden);
    ++block_;
    return;
  }
  Moments& m = replay_.blocks[block_];
  if (at == block.submit) {
    m.submit_end = now_ns();
    m.jobs += static_cast<int64_t>(pool_->observed());
    return;
  }
  m.collect_end = now_ns();
  std::copy_n(step.at(block.y), block.hidden, outputs_[block_].data());
  now_ = m.collect_end + times_[block_].after;
  ++block_;
}

// What was recorded is what the submit node of this block reads; its jobs are counted from here.
void Lane::hand_over(const graph::Step& step) {
  const Block& block = blocks_[block_];
  const Routed& routed = (*record_)[block_];
  std::copy_n(routed.x.data(), routed.x.size(), step.at(block.x));
  std::copy_n(routed.weights.data(), routed.weights.size(), step.at(block.weights));
  std::copy_n(routed.ids.data(), routed.ids.size(), step.at<int64_t>(block.ids));
  replay_.blocks[block_].jobs = -static_cast<int64_t>(pool_->observed());
}

// What this block has submitted runs on while the next one is submitted, so that the pool always has a job.
void Lane::take_tickets() {
  graph::Mailbox& mail = executor_->mailbox();
  for (graph::Mailbox::Ticket* ticket : {&mail.immediate, &mail.posted}) {
    if (*ticket) behind_.push_back(*ticket);
    *ticket = {};
  }
}

// Waits for everything that the block before has submitted.
void Lane::collect_behind() {
  while (!behind_.empty()) {
    const graph::Mailbox::Ticket due = behind_.back();
    behind_.pop_back();
    discarded_.resize(static_cast<size_t>(due.rows * due.experts->hidden));
    due.experts->collect(due.id, discarded_.data(), due.rows);
  }
}

// Where the pool is idle: sleeps until shortly before, by how late the kernel usually wakes us, and spins for
// the rest. Where it works, spinning would take a CPU from it, and a few microseconds are not missed: what is
// submitted then only queues.
void Lane::sleep_until(int64_t due) {
  const int64_t target = pool_->idle() ? due - std::min(late_ + late_ / 4, kMostSpin) : due;
  if (target > now_ns()) {
    const timespec until{static_cast<time_t>(target / 1000000000), static_cast<long>(target % 1000000000)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
    }
    late_ = (7 * late_ + std::clamp<int64_t>(now_ns() - target, 0, kMostSpin)) / 8;
  }
  while (now_ns() < due) __builtin_ia32_pause();
}

}  // namespace ktc::emulate
