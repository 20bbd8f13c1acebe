#include "graph/executor.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <new>
#include <stdexcept>

namespace ktc::graph {

namespace {

constexpr int64_t kHugePage = 2 << 20;

// Zeroed on first touch; huge pages where the kernel gives them.
void* map_memory(int64_t bytes) {
  void* p =
      mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  if (bytes >= kHugePage) madvise(p, static_cast<size_t>(bytes), MADV_HUGEPAGE);
  return p;
}

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

const float* WeightRef::f32(const char* what) const {
  if (dtype != ops::DType::kF32) throw std::invalid_argument(std::string(what) + " must be f32");
  return static_cast<const float*>(data);
}

double NodeSpec::param(const char* key) const {
  const auto it = params.find(key);
  if (it == params.end())
    throw std::invalid_argument(op + " node '" + name + "' lacks parameter '" + key + "'");
  return it->second;
}

double NodeSpec::param(const char* key, double otherwise) const {
  const auto it = params.find(key);
  return it == params.end() ? otherwise : it->second;
}

const WeightRef* NodeSpec::weight(const char* key) const {
  const auto it = weights.find(key);
  return it == weights.end() || it->second.data == nullptr ? nullptr : &it->second;
}

const WeightRef& NodeSpec::need(const char* key) const {
  const WeightRef* w = weight(key);
  if (w == nullptr) throw std::invalid_argument(op + " node '" + name + "' lacks weight '" + key + "'");
  return *w;
}

Executor::Executor(ops::Parallel parallel, std::vector<BufferSpec> buffers, std::vector<int64_t> state_floats,
                   std::vector<Layout> layouts, Options options, const char* isa)
    : parallel_(parallel),
      table_(ops::table(isa)),
      buffers_(std::move(buffers)),
      layouts_(std::move(layouts)),
      options_(options) {
  if (table_ == nullptr)
    throw std::invalid_argument("native operators '" + std::string(isa ? isa : "") +
                                "' cannot run on this machine");
  if (layouts_.empty()) throw std::invalid_argument("a program needs an arena layout");
  for (size_t i = 0; i < layouts_.size(); ++i) {
    if (layouts_[i].offsets.size() != buffers_.size() ||
        (i && layouts_[i].max_rows <= layouts_[i - 1].max_rows))
      throw std::invalid_argument("arena layouts do not fit the buffers");
    arena_bytes_ = std::max(arena_bytes_, layouts_[i].arena_bytes);
  }
  arena_ = static_cast<char*>(map_memory(std::max<int64_t>(arena_bytes_, 64)));
  for (const int64_t floats : state_floats) {
    const int64_t bytes = std::max<int64_t>(floats * 4, 64);
    states_.push_back(static_cast<float*>(map_memory(bytes)));
    state_sizes_.push_back(bytes);
    state_bytes_ += bytes;
  }
}

Executor::~Executor() {
  mailbox_.drain();
  if (arena_) munmap(arena_, static_cast<size_t>(std::max<int64_t>(arena_bytes_, 64)));
  for (size_t i = 0; i < states_.size(); ++i) munmap(states_[i], static_cast<size_t>(state_sizes_[i]));
}

void Executor::add(const NodeSpec& spec) {
  const auto check = [&](const std::vector<int>& ids, size_t count) {
    for (const int id : ids)
      if (id < 0 || static_cast<size_t>(id) >= count)
        throw std::invalid_argument(spec.op + " node '" + spec.name + "' names a buffer that does not exist");
  };
  check(spec.inputs, buffers_.size());
  check(spec.outputs, buffers_.size());
  check(spec.states, states_.size());
  const int linear_input = spec.op == "linear" && spec.linear ? spec.inputs.at(0) : -1;
  nodes_.push_back(make_node(spec, *this));
  if (linear_input >= 0 && linear_input == linear_input_) nodes_[nodes_.size() - 2]->followed();
  linear_input_ = linear_input;
  names_.push_back(spec.op + " " + spec.name);
  auto it = std::find(ops_.begin(), ops_.end(), spec.op);
  if (it == ops_.end()) {
    ops_.push_back(spec.op);
    op_ns_.push_back(0);
    op_calls_.push_back(0);
    it = ops_.end() - 1;
  }
  op_of_node_.push_back(static_cast<int>(it - ops_.begin()));
}

void Executor::step(const int64_t* ids, int64_t rows, int64_t position, bool decode, int64_t logit_rows,
                    float* logits) {
  if (rows < 1 || rows > max_rows())
    throw std::out_of_range("a step takes 1 to " + std::to_string(max_rows()) + " tokens");
  if (position < 0 || position + rows > options_.context)
    throw std::out_of_range("context full: " + std::to_string(position + rows) + " tokens in a context of " +
                            std::to_string(options_.context));
  if (logit_rows < 1 || logit_rows > rows)
    throw std::out_of_range("logit rows must be between 1 and the step's rows");
  for (int64_t i = 0; i < rows; ++i)
    if (ids[i] < 0 || ids[i] >= options_.vocab)
      throw std::out_of_range("token id " + std::to_string(ids[i]) + " is not in the vocabulary of " +
                              std::to_string(options_.vocab));
  const auto layout =
      std::find_if(layouts_.begin(), layouts_.end(), [&](const Layout& l) { return rows <= l.max_rows; });
  const Step step{ids,    rows,       position,         logit_rows,
                  decode, logits,     arena_,           layout->offsets.data(),
                  table_, &parallel_, options_.trivial, hook_ == nullptr};
  size_t i = 0;
  try {
    if (hook_ != nullptr) {
      for (; i < nodes_.size(); ++i) {
        if (!hook_->before(i, step)) continue;
        nodes_[i]->run(step);
        hook_->after(i, step);
      }
    } else if (!profiling_) {
      for (; i < nodes_.size(); ++i) nodes_[i]->run(step);
    } else {
      for (; i < nodes_.size(); ++i) {
        const int64_t begin = now_ns();
        nodes_[i]->run(step);
        const auto op = static_cast<size_t>(op_of_node_[i]);
        op_ns_[op] += now_ns() - begin;
        op_calls_[op] += 1;
      }
    }
  } catch (const std::runtime_error& error) {
    mailbox_.drain();
    const auto* const earlier = dynamic_cast<const EarlierNodeError*>(&error);
    const size_t at_fault = earlier != nullptr ? i - earlier->nodes_before : i;
    throw std::runtime_error(names_[at_fault] + " at position " + std::to_string(position) + ": " +
                             error.what());
  } catch (...) {  // an exception of a callback stays what it is
    mailbox_.drain();
    throw;
  }
}

void Executor::set_deferral(int n_deferred, int n_skipped) {
  Options wanted = options_;
  wanted.n_deferred = n_deferred;
  wanted.n_skipped = n_skipped;
  try {
    for (const auto& node : nodes_) node->configure(wanted);
  } catch (...) {
    for (const auto& node : nodes_) node->configure(options_);
    throw;
  }
  options_ = wanted;
}

void Executor::profile(bool on) {
  profiling_ = on;
  std::fill(op_ns_.begin(), op_ns_.end(), 0);
  std::fill(op_calls_.begin(), op_calls_.end(), 0);
}

std::vector<Executor::OpTime> Executor::times() const {
  std::vector<OpTime> out;
  for (size_t i = 0; i < ops_.size(); ++i) out.push_back({ops_[i], op_ns_[i], op_calls_[i]});
  return out;
}

}  // namespace ktc::graph
