#include "graph/routing_counter.h"

#include <stdexcept>

namespace ktc::graph {

RoutingCounter::RoutingCounter(std::shared_ptr<Executor> executor, const std::vector<Block>& blocks)
    : executor_(std::move(executor)), blocks_(blocks), block_of_node_(executor_->nodes(), -1) {
  for (const Block& block : blocks_) {
    if (block.submit >= block_of_node_.size() || block.experts < 1 || block.top_k < 1)
      throw std::invalid_argument("no MoE layer to count at node " + std::to_string(block.submit));
    block_of_node_[block.submit] = static_cast<int>(counts_.size());
    counts_.emplace_back(static_cast<size_t>(block.experts), 0);
  }
  executor_->set_hook(this);
}

bool RoutingCounter::before(size_t index, const Step& step) {
  const int at = block_of_node_[index];
  if (at < 0) return true;
  const Block& block = blocks_[static_cast<size_t>(at)];
  std::vector<int64_t>& counts = counts_[static_cast<size_t>(at)];
  const int64_t* const ids = step.at<int64_t>(block.ids);
  for (int64_t i = 0; i < step.rows * block.top_k; ++i)
    if (ids[i] >= 0 && ids[i] < block.experts) ++counts[static_cast<size_t>(ids[i])];
  return true;
}

}  // namespace ktc::graph
