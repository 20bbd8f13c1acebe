// One call of a Moe on its way through the pool: its scratch and its phases.
//
// A chunk of tokens is worked off in one of two ways, which give the same bits:
//   by columns: quantise x, gate + up + activation, quantise h, down + weighted sum, add the nodes' parts.
//     A task owns columns. For few rows, where one expert must be shared by all threads.
//   by experts: quantise x, experts, weighted sum. A task takes rows of one expert through all of it, its
//     intermediate results in L2. For as many experts as keep all threads busy (moe_experts.cpp). Of one
//     token's experts, those left over after every thread has as many as the others are divided by columns.
// Both begin with a serial phase: sort by expert, cut tasks. Chunks reuse the same scratch.
#pragma once

#include <cstdint>
#include <vector>

#include "moe.h"

namespace ktc {

struct MoeCall {
  // An expert with tokens: rows [row, row + count) of the sorted activations.
  struct Active {
    int64_t expert, row, count;
    int64_t first;  // active rows before it
  };
  // gate + up task: blocks [begin, end) of one expert.
  struct Panel {
    int64_t active, begin, end;
  };
  // By experts: rows [row, row + count) of one active expert.
  struct Unit {
    int64_t active, row, count;
  };
  struct Node {
    float* h;        // [rows, width]
    ktc_act act;     // of h
    float* partial;  // [chunk, hidden]; node 0 writes to the output itself
    Panel* panels;
    int64_t column_pieces;
  };
  // By experts, one token: the last active experts, which all threads share. A row each, on a tile of its
  // own.
  struct Divided {
    int64_t count = 0;                       // experts
    int64_t up_pieces = 0, down_pieces = 0;  // tasks of each
    float* h = nullptr;                      // [count, width]
    ktc_act act{};                           // of h
  };

  explicit MoeCall(const Moe& moe) : m(moe), nodes(moe.o_.nodes.size()) {}

  // Claims the arena of `job` for so many tokens with `k` experts each. Staged: x, ids, weights and out live
  // there too.
  void lay_out(int64_t tokens, int64_t k, bool staged);
  void add_phases();
  static int64_t scratch_bytes(const Moe& moe, int64_t tokens, bool staged);

  // Phases; `context` is the MoeCall.
  static void plan_task(void* context, const Task& task);
  static void quantize_x_task(void* context, const Task& task);
  static void gate_up_task(void* context, const Task& task);
  static void quantize_h_task(void* context, const Task& task);
  static void down_task(void* context, const Task& task);
  static void combine_task(void* context, const Task& task);
  static void expert_task(void* context, const Task& task);  // or a piece of a divided expert's down
  static void sum_task(void* context, const Task& task);
  // Thread-local bytes of an expert task, beside the kernels' own.
  static int64_t expert_scratch(const Moe& moe);

  static constexpr int64_t kFree = 0, kTaken = -1;
  std::atomic<int64_t> ticket{kTaken};  // or the one under which it is waited for
  MoeCall* older = nullptr;             // see Moe::newest_

  const Moe& m;
  Job* job = nullptr;

  // The whole call.
  const float* x = nullptr;
  int64_t ld_x = 0, tokens = 0;
  int64_t top_k = 0;  // experts a token of this call: at most the layer's
  const int64_t* ids = nullptr;
  const float* weights = nullptr;
  float* out = nullptr;
  int64_t ld_out = 0;
  float* staged_x = nullptr;
  int64_t* staged_ids = nullptr;
  float* staged_weights = nullptr;
  float* staged_out = nullptr;

  // The chunk in work: tokens [begin, begin + count).
  int64_t begin = 0, count = 0;
  int first_phase = 0;
  Active* active = nullptr;
  int64_t active_count = 0;
  int64_t pieces_x = 0, piece_h = 0, pieces_h = 0, pieces_out = 0;
  int64_t* expert_rows = nullptr;  // [experts]
  int64_t* dst_row = nullptr;      // [chunk * top_k of this call]
  int64_t* row_index = nullptr;    // [rows]
  float* row_weight = nullptr;     // [rows]
  float* row_amax = nullptr;       // [rows], integer formats
  ktc_act x_act{};
  std::vector<Node> nodes;
  // By experts.
  bool by_experts = false;
  Unit* units = nullptr;
  int64_t unit_count = 0, pieces_sum = 0;
  Divided divided;
  ktc_act token_act{};            // of x, a row per token
  int64_t* token_rows = nullptr;  // [chunk, top_k] dst_row of each token, ascending
  float* y = nullptr;             // [rows, hidden] results of the experts

 private:
  template <typename Space>
  void take(Space& space, int64_t tokens, bool staged);
  template <typename Space>
  ktc_act take_act(Space& space, int64_t rows, int64_t k_pad) const;
  void sort_by_expert();
  void cut_tasks();
  void cut_gate_up(int node);
  bool cut_experts();
  void cut_divided();
  int64_t most_divided() const;
  ktc_act divided_act(int64_t i) const;
  // On one node, by experts: rows [0, rows) of one expert, blocks [begin, end).
  struct Product {
    const Active& active;
    int64_t rows, begin, end;
    void* scratch;
    ktc_gemm_args args() const;
  };
  void gate_up(const Product& p, const ktc_act& x, float* h) const;
  void quantize_h(int64_t rows, const float* h, const ktc_act& to) const;
  void down(const Product& p, const ktc_act& h, float* out) const;
  void divided_gate_up(int64_t index, void* scratch) const;
  void divided_down(int64_t index, void* scratch) const;
};

}  // namespace ktc
