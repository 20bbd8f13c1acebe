// Python bindings of the decode graph and its operators, called by bindings.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace ktc {

// Executor and DenseScratch; after bind_run, whose Pool, Linear and Moe it takes.
void bind_graph(pybind11::module_& m);
// EmulatedLane (emulate_bindings.cpp), called by bind_graph.
void bind_emulate(pybind11::module_& m);
// The submodule `ops`: single operators for tests.
void bind_ops(pybind11::module_& m);

}  // namespace ktc
