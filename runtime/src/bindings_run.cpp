#include "bindings.h"

namespace ktc {

void bind_run(pybind11::module_&) {}

}  // namespace ktc
