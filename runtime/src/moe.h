// The routed experts of one layer: quantise, gate + up + activation, down, weighted sum.
//
// Tokens are sorted by expert (stable), so an expert multiplies its rows as one matrix. The result is
// the same bits for every thread count and schedule: a task owns its output columns and adds the
// experts in ascending order; partial sums of the nodes are added in node order. Routing itself
// (which experts, what weights) is the caller's.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernel_lib.h"
#include "pool.h"

namespace ktc {

struct MoeNode {
  int64_t begin = 0, end = 0;             // range of the padded intermediate size
  std::vector<ktc_weight> gate_up, down;  // [expert]
  int64_t width() const { return end - begin; }
};

struct MoeOptions {
  int64_t experts = 0, top_k = 0, hidden = 0, intermediate = 0;
  ktc_epilogue activation = KTC_SILU_MUL;
  float alpha = 0.0f, limit = 0.0f;
  Scheme scheme;
  std::vector<MoeNode> nodes;
  std::string force;
  MinRows min_rows;
  Schedule schedule = Schedule::kDynamic;
};

struct MoeCall;

class Moe {
 public:
  // Throws std::invalid_argument for shapes, splits or pointers that do not fit together.
  Moe(std::shared_ptr<KernelLib> lib, std::shared_ptr<Pool> pool, MoeOptions options);
  // Waits for tickets that were never collected.
  ~Moe();

  // x f32 [tokens, hidden], ids [tokens, k], weights f32 [tokens, k]; all are copied. k = 0: the layer's
  // top_k; less for a token's experts in two calls (Expert Deferral) or with some left out.
  // Throws std::invalid_argument naming token and id if an id is out of range.
  int64_t submit(const float* x, int64_t ld_x, int64_t tokens, const int64_t* ids, const float* weights,
                 int64_t k = 0);
  // Writes out f32 [tokens, hidden]; tickets in any order, each once. `help`: as Pool::wait.
  void collect(int64_t ticket, float* out, int64_t ld_out, bool help = true);
  // Waits for a ticket whose result nobody wants.
  void discard(int64_t ticket);
  // submit and collect without the copies.
  void forward(const float* x, int64_t ld_x, int64_t tokens, const int64_t* ids, const float* weights,
               float* out, int64_t ld_out);

  // Scratch of one call with so many tokens, staging included.
  int64_t scratch_bytes(int64_t tokens) const;
  // Tokens worked on at once; more are done in chunks of this size.
  int64_t chunk_tokens() const { return chunk_tokens_; }

  const MoeOptions& options() const { return o_; }
  const Pool& pool() const { return *pool_; }
  std::vector<KernelChoice::Use> report() const;
  // Kernel name -> tokens of an expert from which it is preferred.
  std::map<std::string, int64_t> min_rows() const;

 private:
  friend struct MoeCall;

  MoeCall* take_call();
  MoeCall* finish(int64_t ticket, bool help);
  void give_back(MoeCall* call);
  bool can_go_by_experts() const { return !down_store_.empty(); }
  void check_ids(int64_t tokens, const int64_t* ids, int64_t k) const;

  const std::shared_ptr<KernelLib> lib_;
  const std::shared_ptr<Pool> pool_;
  const MoeOptions o_;
  int64_t h_pad_ = 0;
  int64_t chunk_tokens_ = 0;
  std::vector<KernelChoice> gate_up_;     // one choice, shared by the nodes
  std::vector<KernelChoice> down_;        // [node]: k differs
  std::vector<KernelChoice> down_store_;  // the same without the sum; empty where calls go by columns only
  int64_t kernel_scratch_ = 0;

  // Every call there ever was, linked by MoeCall::older and used again: submit and collect take no lock, and
  // allocate only until there are as many calls as are ever outstanding at once.
  std::atomic<MoeCall*> newest_{nullptr};
  std::atomic<int64_t> next_ticket_{1};
};

}  // namespace ktc
