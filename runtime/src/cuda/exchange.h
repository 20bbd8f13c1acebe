// What the callbacks of a CUDA stream do with routed experts: hand a layer's work to the pool, or wait for
// it.
//
// One step of a model visits its MoE layers in order: submit(0), collect(0), submit(1), ... on one stream. A
// submit copies the staged rows and enqueues them; a collect waits for exactly what is due and writes the
// staging that the stream copies back. Neither throws, allocates on the steady path, takes Python's lock or
// calls CUDA: the first error is kept, the rest of the step passes through, and `check` raises it once the
// stream is idle. Expert Deferral (paper, section 4) and skipping are decided here, so a captured graph does
// not depend on them. What this file is not: streams, copies and capture (lane.h).
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "moe.h"

namespace ktc::cuda {

// In place of the id of an expert that the device computes itself. Its weight still counts in the order that
// decides who is deferred or skipped.
inline constexpr int64_t kElsewhere = -1;

// One visit of one MoE layer. Its address is what a stream carries, so it must outlive the graph that holds
// it.
struct Call {
  int layer = 0;
  int64_t rows = 0;
  bool decode = false;           // deferral and skipping apply
  bool partial = false;          // one row; an id of kElsewhere is computed on the device, not here
  const float* x = nullptr;      // [rows, hidden]
  const float* w = nullptr;      // [rows, top_k]
  const int64_t* ids = nullptr;  // [rows, top_k]
  float* out = nullptr;          // [rows, hidden]
};

// Where `rows` rows lie in a send buffer: x f32, weights f32, ids i64, each after the other.
struct SendLayout {
  int64_t weights = 0, ids = 0, bytes = 0;
  SendLayout(int64_t hidden, int64_t top_k, int64_t rows);
};

class Exchange {
 public:
  struct Stats {
    int64_t submits = 0, collects = 0, errors = 0;
    int64_t wait_ns = 0;  // spent in collects
  };

  // The layers in the order of the model; all of one hidden size, with any top_k.
  // `help`: the waiting callback works too, as the pool's first thread; otherwise only workers do arithmetic.
  // Throws std::invalid_argument for no layers or different hidden sizes.
  Exchange(std::vector<std::shared_ptr<Moe>> layers, bool help);
  ~Exchange();

  // Decode steps from now on: of a token's experts, sorted by weight, layer l drops the last skipped[l] and
  // leaves the deferred[l] before those to layer l + 1, which adds their sum. The stream must be idle. Throws
  // std::invalid_argument for numbers that leave none, or a last layer that defers.
  void split(const std::vector<int64_t>& deferred, const std::vector<int64_t>& skipped);

  void submit(const Call& call) noexcept;
  void collect(const Call& call) noexcept;

  // The stream is idle: takes back what an abandoned step left behind, and rethrows the first error since the
  // last check as std::runtime_error naming the layer.
  void check();

  int layers() const { return static_cast<int>(layers_.size()); }
  int64_t hidden() const { return hidden_; }
  int64_t top_k(int layer) const { return layers_[layer].moe->options().top_k; }
  Stats stats() const;

 private:
  struct Ticket {
    Moe* moe = nullptr;
    int64_t id = 0;
    explicit operator bool() const { return moe != nullptr; }
  };
  struct Layer {
    std::shared_ptr<Moe> moe;
    int64_t deferred = 0, skipped = 0;
    bool open = false;         // submitted and not yet collected; with nothing to do there is no ticket
    Ticket immediate, posted;  // posted: due at the next layer's collect
  };

  void sort_and_submit(Layer& layer, const Call& call);
  void submit_one(Layer& layer, const Call& call);
  void fail(int layer) noexcept;
  static void drain(Ticket& ticket) noexcept;

  std::vector<Layer> layers_;
  const bool help_;
  int64_t hidden_ = 0;
  std::vector<int64_t> ids_;  // sorted slots, [rows, now] then [rows, later]
  std::vector<float> weights_, due_;
  std::atomic<bool> failed_{false};
  mutable std::mutex mutex_;  // error_, where_, stats_
  std::exception_ptr error_;
  int where_ = 0;
  Stats stats_;
};

}  // namespace ktc::cuda
