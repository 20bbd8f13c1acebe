// What bindings.cpp takes from bindings_run.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace ktc {

// KernelLib, Pool, HugeBuffer, Linear and Moe.
void bind_run(pybind11::module_& m);

}  // namespace ktc
