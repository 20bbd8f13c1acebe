// Python bindings: the machine's limits.
#include <pybind11/stl.h>

#include "bindings.h"
#include "machine_limits.h"

namespace py = pybind11;
using namespace py::literals;

namespace ktc {

void bind_limits(py::module_& m) {
  using Release = py::call_guard<py::gil_scoped_release>;
  m.def("compute_kinds", &compute_kinds);
  m.def("measure_compute", &measure_compute, "kind"_a, "cpus"_a, "seconds"_a, Release());
  py::class_<ReadProbe>(m, "ReadProbe")
      .def(py::init<int64_t, bool>(), "nbytes"_a, "huge"_a, Release())
      .def_property_readonly("nbytes", &ReadProbe::nbytes)
      .def("sample", &ReadProbe::sample, "cpus"_a, Release());
}

}  // namespace ktc
