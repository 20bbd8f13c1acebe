// From the runtime's packed operators to what graph nodes call.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

#include "graph/executor.h"

namespace ktc::graph {

// `object` is a bound Linear; the result keeps it alive.
std::shared_ptr<PackedLinear> adapt_linear(const pybind11::object& object);
// `object` is a bound Moe or DenseExperts.
std::shared_ptr<Experts> adapt_experts(const pybind11::object& object);

}  // namespace ktc::graph
