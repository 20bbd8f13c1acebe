// Counts which experts the steps of an executor choose, by looking at the ids that its moe_submit nodes read.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "graph/executor.h"

namespace ktc::graph {

class RoutingCounter final : public StepHook {
 public:
  // A MoE layer: the index of its moe_submit node, the buffer of its ids [rows][top_k], its experts.
  struct Block {
    size_t submit;
    int ids;
    int64_t top_k, experts;
  };

  // Counts every step of `executor` from now on until it is destroyed. Throws std::invalid_argument for a
  // node that is not there, or a layer without experts.
  RoutingCounter(std::shared_ptr<Executor> executor, const std::vector<Block>& blocks);
  ~RoutingCounter() override { executor_->set_hook(nullptr); }

  // Uses of each expert so far, per block in the order given. Ids outside a layer's experts are not counted:
  // the experts themselves refuse them.
  const std::vector<std::vector<int64_t>>& counts() const { return counts_; }

 private:
  bool before(size_t index, const Step& step) override;
  void after(size_t, const Step&) override {}

  const std::shared_ptr<Executor> executor_;
  std::vector<Block> blocks_;
  std::vector<int> block_of_node_;  // -1: no moe_submit
  std::vector<std::vector<int64_t>> counts_;
};

}  // namespace ktc::graph
