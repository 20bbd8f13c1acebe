// Python bindings: the machine, quantise and pack. Threads, memory and operators: bindings_run.cpp.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "cpu.h"
#include "graph/bindings_graph.h"
#include "pack.h"

namespace py = pybind11;
using namespace py::literals;

namespace {

ktc::SourceType source_type(const std::string& name) {
  if (name == "fp32") return ktc::SourceType::kFp32;
  if (name == "bf16") return ktc::SourceType::kBf16;
  if (name == "fp16") return ktc::SourceType::kFp16;
  throw std::invalid_argument("unknown source data type '" + name + "'");
}

using RowMap = py::array_t<int64_t, py::array::c_style>;

int64_t pack_matrix(uintptr_t src, const std::string& src_dtype, const RowMap& rows, int64_t k, int64_t ld,
                    int64_t col_stride, const std::string& data_type, const std::string& scale, int64_t group,
                    uintptr_t out_tiles, uintptr_t out_scale, uintptr_t out_mult) {
  if (rows.ndim() != 1) throw std::invalid_argument("rows must have one dimension");
  if (k < 1) throw std::invalid_argument("k must be at least 1");
  const ktc::Scheme scheme = ktc::Scheme::from_names(data_type, scale, group);
  const ktc::PackSource source{reinterpret_cast<const void*>(src),
                               source_type(src_dtype),
                               rows.data(),
                               rows.shape(0),
                               k,
                               ld,
                               col_stride};
  py::gil_scoped_release release;
  return ktc::pack_matrix(source, scheme, reinterpret_cast<uint8_t*>(out_tiles),
                          reinterpret_cast<float*>(out_scale), reinterpret_cast<uint8_t*>(out_mult));
}

void unpack_matrix(uintptr_t tiles, uintptr_t scale_ptr, uintptr_t mult, int64_t n_pad, int64_t k_pad,
                   const std::string& data_type, const std::string& scale, int64_t group, uintptr_t out_f32) {
  const ktc::Scheme scheme = ktc::Scheme::from_names(data_type, scale, group);
  py::gil_scoped_release release;
  ktc::unpack_matrix(reinterpret_cast<const uint8_t*>(tiles), reinterpret_cast<const float*>(scale_ptr),
                     reinterpret_cast<const uint8_t*>(mult), n_pad, k_pad, scheme,
                     reinterpret_cast<float*>(out_f32));
}

}  // namespace

PYBIND11_MODULE(_runtime, m) {
  m.doc() = "Native runtime of ktc; see ktc/_runtime.pyi.";
  m.def("cpu_features", &ktc::cpu_features);
  m.def("amx_permission", &ktc::amx_permission);
  m.def("numa_nodes", [] {
    std::vector<std::vector<int>> nodes;
    for (ktc::NumaNode& node : ktc::numa_nodes()) nodes.push_back(std::move(node.cpus));
    return nodes;
  });
  m.def("pack_matrix", &pack_matrix, "src"_a, "src_dtype"_a, "rows"_a, "k"_a, "ld"_a, "col_stride"_a,
        "data_type"_a, "scale"_a, "group"_a, "out_tiles"_a, "out_scale"_a, "out_mult"_a);
  m.def("unpack_matrix", &unpack_matrix, "tiles"_a, "scale_ptr"_a, "mult"_a, "n_pad"_a, "k_pad"_a,
        "data_type"_a, "scale"_a, "group"_a, "out_f32"_a);
  ktc::bind_run(m);
  ktc::bind_limits(m);
  ktc::bind_graph(m);
  ktc::bind_cuda(m);
}
