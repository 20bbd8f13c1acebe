// Replays a program of data: nodes over buffers in one arena, from token ids to logits, one call per step.
//
// Built once (ktc/graph/build.py); a step allocates nothing, holds no lock and runs no Python unless the
// program has callback nodes. Position, rows and the number of logit rows are data. Not thread-safe: one
// step at a time.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "graph/experts.h"
#include "graph/mailbox.h"
#include "graph/table_file.h"
#include "ops/attention.h"
#include "ops/ops.h"
#include "ops/parallel.h"

namespace ktc::graph {

// A dense linear on packed tiles, as the runtime's Linear offers it.
struct PackedLinear {
  virtual ~PackedLinear() = default;
  // x and y stay the caller's until `wait`, which follows once and rethrows what a worker threw.
  virtual void* submit(const float* x, int64_t ld_x, int64_t rows, float* y, int64_t ld_y) = 0;
  virtual void wait(void* ticket) = 0;
};

// A module that stays outside the native operators: rows of x in, rows of y out.
using Callback = std::function<void(const float* x, float* y, int64_t rows, int64_t position)>;

struct WeightRef {
  const void* data = nullptr;
  ops::DType dtype = ops::DType::kF32;
  int64_t rows = 0, cols = 0;
  ops::Matrix matrix() const { return {data, dtype, cols}; }
  const float* f32(const char* what) const;  // throws unless f32
};

// A node as the program states it.
struct NodeSpec {
  std::string op, name;
  std::vector<int> inputs, outputs, states;
  std::map<std::string, double> params;
  std::map<std::string, WeightRef> weights;
  std::shared_ptr<PackedLinear> linear;
  std::shared_ptr<Experts> experts;
  std::shared_ptr<const TableFile> table;  // of `embed`, in place of a weight in memory
  Callback callback;

  double param(const char* key) const;  // throws std::invalid_argument naming node and key
  double param(const char* key, double otherwise) const;
  const WeightRef* weight(const char* key) const;  // null if absent
  const WeightRef& need(const char* key) const;
};

enum class Rows : int32_t { kTokens = 0, kLogits = 1 };  // how many rows a buffer has in a step: T, or R

struct BufferSpec {
  Rows rows;
  int64_t row_bytes;
};

// Where every buffer lies for steps of up to `max_rows` rows. An offset of -1 is the caller's logits.
struct Layout {
  int64_t max_rows;
  int64_t arena_bytes;
  std::vector<int64_t> offsets;
};

struct Options {
  int64_t context = 0;
  int64_t vocab = 0;
  int n_deferred = -1;  // -1: as each moe_submit node says; otherwise for all layers
  int n_skipped = 0;
  bool trivial = false;  // heavy kernels do nothing: measures everything else
};

// What nodes see of the step in progress.
struct Step {
  const int64_t* ids;
  int64_t rows, position, logit_rows;
  bool decode;
  float* logits;
  char* arena;
  const int64_t* offsets;
  const ops::Table* table;
  const ops::Parallel* parallel;
  bool trivial;
  bool together;  // a node may leave its end to the next one (Node::followed)

  template <class T = float>
  T* at(int buffer) const {
    const int64_t o = offsets[buffer];
    return o < 0 ? reinterpret_cast<T*>(logits) : reinterpret_cast<T*>(arena + o);
  }
  int64_t rows_of(Rows r) const { return r == Rows::kTokens ? rows : logit_rows; }
};

class Node {
 public:
  virtual ~Node() = default;
  virtual void run(const Step& step) = 0;
  // The node after this one is a linear too, of the same rows, on packed tiles: the two may run together.
  virtual void followed() {}
  // Takes over changed options; throws std::invalid_argument, and nothing has changed, if they do not fit.
  virtual void configure(const Options&) {}
};

// Looks on while the nodes of a step run, and may leave some out. Used by the emulated device lane.
class StepHook {
 public:
  virtual ~StepHook() = default;
  // Before node `index` (in order of Executor::add); false: it does not run.
  virtual bool before(size_t index, const Step& step) = 0;
  // After a node that ran.
  virtual void after(size_t index, const Step& step) = 0;
};

class Executor {
 public:
  // `state_floats[i]`: floats of cache i for the whole context.
  Executor(ops::Parallel parallel, std::vector<BufferSpec> buffers, std::vector<int64_t> state_floats,
           std::vector<Layout> layouts, Options options, const char* isa);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  void add(const NodeSpec& spec);

  // Runs `rows` tokens at `position`; writes the last `logit_rows` rows of logits [logit_rows, vocab].
  // `decode` switches Expert Deferral on. Throws std::out_of_range for a full context or a bad id; any
  // exception leaves no expert work outstanding and the caches undefined from `position` on, and a
  // std::runtime_error names the node.
  void step(const int64_t* ids, int64_t rows, int64_t position, bool decode, int64_t logit_rows,
            float* logits);

  // Experts deferred (-1: as each node says) and skipped from the next decode step on. Throws
  // std::invalid_argument, and nothing has changed, if some layer cannot.
  void set_deferral(int n_deferred, int n_skipped);

  // Null: none. The caller keeps it alive until it is taken off again.
  void set_hook(StepHook* hook) { hook_ = hook; }
  size_t nodes() const { return nodes_.size(); }

  // Nanoseconds and calls per operator since the last reset; only filled while profiling is on.
  struct OpTime {
    std::string op;
    int64_t nanoseconds, calls;
  };
  void profile(bool on);
  std::vector<OpTime> times() const;

  int64_t arena_bytes() const { return arena_bytes_; }
  char* arena() const { return arena_; }  // for measurements
  int64_t state_bytes() const { return state_bytes_; }
  int64_t max_rows() const { return layouts_.back().max_rows; }
  const char* isa() const { return table_->name; }
  bool has_bf16() const { return table_->tiles_bf16 != nullptr; }  // attention over many rows
  const Options& options() const { return options_; }
  float* state(int index) const { return states_.at(static_cast<size_t>(index)); }
  const ops::Parallel& parallel() const { return parallel_; }
  Mailbox& mailbox() { return mailbox_; }
  Rows rows_kind(int buffer) const { return buffers_.at(static_cast<size_t>(buffer)).rows; }
  int64_t row_bytes(int buffer) const { return buffers_.at(static_cast<size_t>(buffer)).row_bytes; }

 private:
  ops::Parallel parallel_;
  const ops::Table* table_;
  std::vector<BufferSpec> buffers_;
  std::vector<Layout> layouts_;  // ascending max_rows
  Options options_;
  std::vector<float*> states_;
  std::vector<int64_t> state_sizes_;
  char* arena_ = nullptr;
  int64_t arena_bytes_ = 0, state_bytes_ = 0;
  Mailbox mailbox_;
  std::vector<std::unique_ptr<Node>> nodes_;
  std::vector<std::string> names_;  // of the nodes, for messages
  std::vector<std::string> ops_;
  std::vector<int> op_of_node_;
  std::vector<int64_t> op_ns_, op_calls_;
  bool profiling_ = false;
  StepHook* hook_ = nullptr;
  int linear_input_ = -1;  // of the node added last, if that is a packed linear
};

// nodes.cpp: the node for a specification; throws std::invalid_argument for an unknown operator.
std::unique_ptr<Node> make_node(const NodeSpec& spec, Executor& executor);
// nodes_attention.cpp
std::unique_ptr<Node> make_gqa(const NodeSpec& spec, Executor& executor);
std::unique_ptr<Node> make_mla(const NodeSpec& spec, Executor& executor);
// nodes_moe.cpp
std::unique_ptr<Node> make_moe_submit(const NodeSpec& spec, Executor& executor);
std::unique_ptr<Node> make_moe_collect(const NodeSpec& spec, Executor& executor);

}  // namespace ktc::graph
