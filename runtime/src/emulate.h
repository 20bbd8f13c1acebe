// The emulated device lane: a decode step whose device takes the time that it is told, while the routed
// experts really run (docs/emulate.md).
//
// A step is recorded first: everything is computed, and what goes into and comes out of each MoE block is
// kept. It is then replayed on the clock: moe_submit and moe_collect run with the recorded inputs, every
// other node is left out and its time is slept. What an operator would cost on a device is the caller's
// business (ktc/emulate), as is what to make of the moments that come back.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "graph/executor.h"
#include "pool.h"

namespace ktc::emulate {

// One MoE block of the program: its two nodes, the buffers of the first's inputs and of the second's output.
struct Block {
  int64_t submit = 0, collect = 0;
  int x = 0, weights = 0, ids = 0, y = 0;
  int64_t top_k = 0, hidden = 0;
};

// Nanoseconds of the device and the link: from the step's begin or the end of the block before until the
// submit callback is due; from its return until the sync callback is due; from that one's return to the
// block's end.
struct Times {
  int64_t before = 0, between = 0, after = 0;
};

// Moments of one block on the monotonic clock, ns. Due moments are the device's, the others the callbacks'.
struct Moments {
  int64_t begin = 0, submit_due = 0, submit_begin = 0, submit_end = 0, collect_due = 0, collect_begin = 0,
          collect_end = 0;
  int64_t jobs = 0;  // that this block handed to the pool: immediate, and deferred if any
};

struct Replay {
  std::vector<Moments> blocks;
  int64_t end = 0;                   // of the step: after the last operator of the device
  std::vector<Pool::JobTimes> jobs;  // in order of submission
  std::vector<int64_t> differing;    // blocks whose output is not what was recorded
  int64_t lane_cpu = 0;              // ns that the lane's thread itself took of a CPU
  bool realtime = false;             // the lane had real-time priority
};

class Lane final : private graph::StepHook {
 public:
  // Blocks in program order. Throws std::invalid_argument if one is not, or if the pool's callers work.
  Lane(std::shared_ptr<graph::Executor> executor, std::shared_ptr<Pool> pool, std::vector<Block> blocks);

  // `tail`: ns of the device after the last block. Throws std::invalid_argument: not one Times per block.
  void set_times(std::vector<Times> times, int64_t tail);

  // A decode step of one token as Executor::step does it, kept under the number that is returned.
  int64_t record(int64_t id, int64_t position, float* logits);
  // Step `number` again on the clock, deferring as the executor does now. Neither caches nor logits are
  // touched.
  Replay replay(int64_t number);
  // The experts of step `number` without a timeline, one block behind the other, so that the pool never runs
  // out of jobs: nanoseconds from the end of the block before (the first: from its first task) to the end of
  // each. A block is one job, or two where the executor defers.
  std::vector<int64_t> time_jobs(int64_t number);
  // Drops all recorded steps.
  void forget() { records_.clear(); }
  int64_t recorded() const { return static_cast<int64_t>(records_.size()); }

 private:
  struct Routed {
    std::vector<float> x, weights, y;
    std::vector<int64_t> ids;
  };
  enum class Mode { kRecord, kReplay, kJobs };

  bool before(size_t index, const graph::Step& step) override;
  void after(size_t index, const graph::Step& step) override;
  void run(Mode mode, int64_t id, int64_t position, float* logits);
  void begin_replay(int64_t number);
  void hand_over(const graph::Step& step);
  void take_tickets();
  void collect_behind();
  void sleep_until(int64_t due);

  const std::shared_ptr<graph::Executor> executor_;
  const std::shared_ptr<Pool> pool_;
  const std::vector<Block> blocks_;
  std::vector<Times> times_;
  int64_t tail_ = 0;
  std::vector<std::vector<Routed>> records_;  // [step][block]
  std::vector<float> sink_;                   // logits that a replay does not write

  // The step in progress.
  Mode mode_ = Mode::kRecord;
  size_t block_ = 0;
  int64_t now_ = 0;  // the device's clock
  std::vector<Routed>* record_ = nullptr;
  std::vector<std::vector<float>> outputs_;
  std::vector<graph::Mailbox::Ticket> behind_;  // kJobs: of the block before
  std::vector<float> discarded_;
  Replay replay_;
  int64_t late_ = 20000;  // how late the kernel wakes us, ns: a moving average
};

}  // namespace ktc::emulate
