// The routed experts of one layer as the graph sees them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "ops/ops.h"
#include "ops/parallel.h"

namespace ktc::graph {

// submit copies its inputs before it returns; a ticket is collected exactly once.
struct Experts {
  virtual ~Experts() = default;
  // x [rows][hidden], ids and weights [rows][k]. k may be less than the layer's top_k.
  virtual int64_t submit(const float* x, int64_t rows, const int64_t* ids, const float* weights,
                         int64_t k) = 0;
  // Waits, then writes out [rows][hidden]; rethrows what a worker threw.
  virtual void collect(int64_t ticket, float* out, int64_t rows) = 0;
  int64_t experts = 0, top_k = 0, hidden = 0;
};

// Experts from unpacked matrices in the layout of Hugging Face's containers: the oracle, and what runs a MoE
// block that no rule matched. Computes in submit; rows are grouped by expert, summed in expert order.
enum class Activation : int32_t { kSiluMul = 0, kSiluClamp = 1, kSwigluOai = 2 };
struct DenseExpertsSpec {
  int64_t experts, top_k, hidden, intermediate, max_rows;
  Activation activation;
  float alpha, limit;
  const void* gate_up;  // [E][2I][H], or [E][H][2I] when transposed
  const void* down;     // [E][H][I], or [E][I][H]
  ops::DType dtype;
  bool transposed, interleaved;
  const float* gate_up_bias;  // [E][2I] or null
  const float* down_bias;     // [E][H] or null
};
// Scratch and result rows that the layers of one model share.
struct DenseScratch {
  std::vector<float> x, gate_up, h, y;  // one expert's rows
  std::vector<float> results[3];        // tickets: immediate, and deferred by this layer and the last
  bool taken[3] = {false, false, false};
  std::vector<int64_t> token;
  std::vector<float> weight;
};
std::shared_ptr<Experts> make_dense_experts(const DenseExpertsSpec& spec, ops::Parallel parallel,
                                            const ops::Table* table, std::shared_ptr<DenseScratch> scratch);

}  // namespace ktc::graph
