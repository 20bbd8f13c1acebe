#include "moe.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <stdexcept>
#include <utility>

#include "moe_call.h"
#include "splitting.h"

namespace ktc {
namespace {

constexpr int64_t kMaxChunkTokens = 4096;
constexpr int64_t kScratchBudget = int64_t{1} << 30;  // of one chunk, staging not included

std::invalid_argument bad(const std::string& message) { return std::invalid_argument("moe: " + message); }

void check_weight(const ktc_weight& w, const Scheme& scheme, const char* what, size_t node, size_t expert) {
  const std::string where =
      std::string(what) + " of expert " + std::to_string(expert) + " on node " + std::to_string(node);
  if (w.tiles == nullptr || reinterpret_cast<uintptr_t>(w.tiles) % 64 != 0)
    throw bad(where + ": tiles must be 64-byte aligned and not null");
  if (scheme.integer() && w.scale == nullptr) throw bad(where + ": scales are missing");
  if (scheme.has_mult() && w.mult == nullptr) throw bad(where + ": multipliers are missing");
}

void check_options(const MoeOptions& o, const Pool& pool) {
  if (o.experts < 1 || o.top_k < 1 || o.hidden < 1 || o.intermediate < 1)
    throw bad("experts, top_k, hidden and intermediate must be at least 1");
  if (o.activation != KTC_SILU_MUL && o.activation != KTC_SILU_CLAMP && o.activation != KTC_SWIGLU_OAI)
    throw bad("not an activation");
  if (static_cast<int>(o.nodes.size()) != pool.nodes())
    throw bad("weights are split over " + std::to_string(o.nodes.size()) + " nodes, the pool has " +
              std::to_string(pool.nodes()));
  const int64_t i_pad = round_up(o.intermediate, 64);
  int64_t edge = 0;
  for (size_t n = 0; n < o.nodes.size(); ++n) {
    const MoeNode& node = o.nodes[n];
    if (node.begin != edge || node.end <= node.begin || node.end % 64 != 0)
      throw bad("split of node " + std::to_string(n) + " [" + std::to_string(node.begin) + ", " +
                std::to_string(node.end) + ") must follow the one before and end on a multiple of 64");
    if (o.scheme.group > 0 && node.begin % o.scheme.group != 0)
      throw bad("split of node " + std::to_string(n) + " cuts a group of " + std::to_string(o.scheme.group));
    edge = node.end;
    if (static_cast<int64_t>(node.gate_up.size()) != o.experts ||
        static_cast<int64_t>(node.down.size()) != o.experts)
      throw bad("node " + std::to_string(n) + " has weights of " + std::to_string(node.gate_up.size()) +
                " experts instead of " + std::to_string(o.experts));
    for (size_t e = 0; e < node.gate_up.size(); ++e) {
      check_weight(node.gate_up[e], o.scheme, "gate_up", n, e);
      check_weight(node.down[e], o.scheme, "down", n, e);
      if (n > 0 && node.down[e].bias != nullptr) throw bad("the bias of down belongs to node 0 only");
    }
  }
  if (edge != i_pad)
    throw bad("splits end at " + std::to_string(edge) + ", the padded intermediate size is " +
              std::to_string(i_pad));
}

}  // namespace

Moe::Moe(std::shared_ptr<KernelLib> lib, std::shared_ptr<Pool> pool, MoeOptions options)
    : lib_(std::move(lib)), pool_(std::move(pool)), o_(std::move(options)) {
  check_options(o_, *pool_);
  h_pad_ = round_up(o_.hidden, 64);
  gate_up_.emplace_back(*lib_, o_.scheme, o_.activation, h_pad_, o_.force, o_.min_rows);
  kernel_scratch_ = gate_up_[0].scratch_bytes();
  for (const MoeNode& node : o_.nodes) {
    down_.emplace_back(*lib_, o_.scheme, KTC_SCATTER_ADD, node.width(), o_.force, o_.min_rows);
    kernel_scratch_ = std::max(kernel_scratch_, down_.back().scratch_bytes());
  }
  // With more nodes the rows' scales would have to wait for all of them.
  if (o_.nodes.size() == 1) {
    try {
      down_store_.emplace_back(*lib_, o_.scheme, KTC_STORE, o_.nodes[0].width(), o_.force, o_.min_rows);
      kernel_scratch_ = std::max(kernel_scratch_, down_store_[0].scratch_bytes());
      kernel_scratch_ += MoeCall::expert_scratch(*this);
    } catch (const std::invalid_argument&) {  // a library without these kernels
    }
  }
  chunk_tokens_ = kMaxChunkTokens;
  while (chunk_tokens_ > 16 && MoeCall::scratch_bytes(*this, chunk_tokens_, false) > kScratchBudget)
    chunk_tokens_ /= 2;
}

Moe::~Moe() {
  for (MoeCall* call = newest_.load(std::memory_order_acquire); call != nullptr;) {
    if (call->ticket.load(std::memory_order_acquire) > 0) {
      try {
        pool_->wait(call->job);
      } catch (...) {  // nobody asked for the result
      }
      pool_->release(call->job);
    }
    delete std::exchange(call, call->older);
  }
}

void Moe::check_ids(int64_t tokens, const int64_t* ids, int64_t k) const {
  if (tokens < 0) throw bad("negative token count");
  if (k < 1 || k > o_.top_k)
    throw bad("a token takes 1 to " + std::to_string(o_.top_k) + " experts, not " + std::to_string(k));
  for (int64_t i = 0; i < tokens * k; ++i) {
    if (ids[i] < 0 || ids[i] >= o_.experts)
      throw bad("token " + std::to_string(i / k) + " is routed to expert " + std::to_string(ids[i]) +
                ", there are " + std::to_string(o_.experts));
  }
}

MoeCall* Moe::take_call() {
  MoeCall* call = newest_.load(std::memory_order_acquire);
  for (; call != nullptr; call = call->older) {
    int64_t state = MoeCall::kFree;
    if (call->ticket.compare_exchange_strong(state, MoeCall::kTaken, std::memory_order_acq_rel)) break;
  }
  if (call == nullptr) {
    call = new MoeCall(*this);
    call->older = newest_.load(std::memory_order_relaxed);
    while (!newest_.compare_exchange_weak(call->older, call, std::memory_order_acq_rel)) {
    }
  }
  try {
    call->job = pool_->acquire();
  } catch (...) {
    call->ticket.store(MoeCall::kFree, std::memory_order_release);
    throw;
  }
  return call;
}

void Moe::give_back(MoeCall* call) {
  pool_->release(call->job);
  call->job = nullptr;
  call->ticket.store(MoeCall::kFree, std::memory_order_release);
}

int64_t Moe::submit(const float* x, int64_t ld_x, int64_t tokens, const int64_t* ids, const float* weights,
                    int64_t k) {
  if (k == 0) k = o_.top_k;
  check_ids(tokens, ids, k);
  MoeCall* const call = take_call();
  try {
    call->lay_out(tokens, k, true);
    for (int64_t t = 0; t < tokens; ++t)
      std::memcpy(call->staged_x + t * o_.hidden, x + t * ld_x, o_.hidden * sizeof(float));
    if (tokens > 0) {
      std::memcpy(call->staged_ids, ids, tokens * k * sizeof(int64_t));
      std::memcpy(call->staged_weights, weights, tokens * k * sizeof(float));
    }
    call->x = call->staged_x;
    call->ids = call->staged_ids;
    call->weights = call->staged_weights;
    call->out = call->staged_out;
    call->ld_x = call->ld_out = o_.hidden;
    call->add_phases();
    pool_->submit(call->job);
  } catch (...) {
    give_back(call);
    throw;
  }
  const int64_t ticket = next_ticket_.fetch_add(1, std::memory_order_relaxed);
  call->ticket.store(ticket, std::memory_order_release);
  return ticket;
}

// The finished call of a ticket; a task's exception gives the call back and is raised here.
MoeCall* Moe::finish(int64_t ticket, bool help) {
  MoeCall* call = ticket > 0 ? newest_.load(std::memory_order_acquire) : nullptr;
  for (; call != nullptr; call = call->older) {
    int64_t state = ticket;
    if (call->ticket.compare_exchange_strong(state, MoeCall::kTaken, std::memory_order_acq_rel)) break;
  }
  if (call == nullptr)
    throw bad("ticket " + std::to_string(ticket) + " was never issued or is already collected");
  try {
    pool_->wait(call->job, help);
  } catch (...) {
    give_back(call);
    throw;
  }
  return call;
}

void Moe::discard(int64_t ticket) { give_back(finish(ticket, true)); }

void Moe::collect(int64_t ticket, float* out, int64_t ld_out, bool help) {
  MoeCall* const call = finish(ticket, help);
  for (int64_t t = 0; t < call->tokens; ++t)
    std::memcpy(out + t * ld_out, call->staged_out + t * o_.hidden, o_.hidden * sizeof(float));
  give_back(call);
}

void Moe::forward(const float* x, int64_t ld_x, int64_t tokens, const int64_t* ids, const float* weights,
                  float* out, int64_t ld_out) {
  check_ids(tokens, ids, o_.top_k);
  if (tokens == 0) return;
  MoeCall* const call = take_call();
  try {
    call->lay_out(tokens, o_.top_k, false);
    call->x = x;
    call->ld_x = ld_x;
    call->ids = ids;
    call->weights = weights;
    call->out = out;
    call->ld_out = ld_out;
    call->add_phases();
    pool_->submit(call->job);
    pool_->wait(call->job);
  } catch (...) {
    give_back(call);
    throw;
  }
  give_back(call);
}

int64_t Moe::scratch_bytes(int64_t tokens) const { return MoeCall::scratch_bytes(*this, tokens, true); }

std::vector<KernelChoice::Use> Moe::report() const {
  std::map<std::string, int64_t> calls;
  const auto add = [&calls](const KernelChoice& choice) {
    for (const KernelChoice::Use& use : choice.report()) calls[use.name] += use.calls;
  };
  add(gate_up_[0]);
  for (const KernelChoice& choice : down_) add(choice);
  std::vector<KernelChoice::Use> uses;
  for (const auto& [name, count] : calls) uses.push_back({name, count});
  return uses;
}

std::map<std::string, int64_t> Moe::min_rows() const {
  std::map<std::string, int64_t> all;
  gate_up_[0].add_min_rows(all);
  for (const KernelChoice& choice : down_) choice.add_min_rows(all);
  return all;
}

}  // namespace ktc
