// What bindings.cpp takes from the other bindings_*.cpp.
#pragma once

#include <pybind11/pybind11.h>

namespace ktc {

// KernelLib, Pool, HugeBuffer, Linear and Moe.
void bind_run(pybind11::module_& m);

// compute_kinds, measure_compute and ReadProbe.
void bind_limits(pybind11::module_& m);

// CudaLane (cuda/bindings_cuda.cpp).
void bind_cuda(pybind11::module_& m);

}  // namespace ktc
