// What nodes read of their specification, with errors that name the node.
#pragma once

#include <stdexcept>

#include "graph/executor.h"

namespace ktc::graph {

inline int input(const NodeSpec& s, size_t i) {
  if (i >= s.inputs.size()) throw std::invalid_argument(s.op + " node '" + s.name + "' has too few inputs");
  return s.inputs[i];
}
inline int output(const NodeSpec& s, size_t i = 0) {
  if (i >= s.outputs.size()) throw std::invalid_argument(s.op + " node '" + s.name + "' has too few outputs");
  return s.outputs[i];
}
inline int64_t integer(const NodeSpec& s, const char* key) { return static_cast<int64_t>(s.param(key)); }

}  // namespace ktc::graph
