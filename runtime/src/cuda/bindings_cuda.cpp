// Python bindings of the CUDA lane. Pointers and streams are plain integers.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "bindings.h"
#include "cuda/lane.h"
#include "cuda/mapped.h"

namespace py = pybind11;
using namespace py::literals;

namespace ktc {
namespace {

using Release = py::call_guard<py::gil_scoped_release>;

void* at(uintptr_t address) { return reinterpret_cast<void*>(address); }

std::shared_ptr<cuda::Lane> make_lane(std::vector<std::shared_ptr<Moe>> layers, const std::string& cudart,
                                      bool help) {
  auto exchange = std::make_unique<cuda::Exchange>(std::move(layers), help);
  return std::make_shared<cuda::Lane>(std::move(exchange), cuda::Cudart::find(cudart));
}

py::dict stats(cuda::Lane& lane) {
  const cuda::Exchange::Stats s = lane.exchange().stats();
  return py::dict("submits"_a = s.submits, "collects"_a = s.collects, "errors"_a = s.errors,
                  "wait_ns"_a = s.wait_ns);
}

// A capsule that array libraries take over; what nobody took is freed with it.
py::object view_memory(uintptr_t address, const std::vector<int64_t>& shape, const std::string& type,
                       int device) {
  const bool brain = type == "bf16";
  if (!brain && type != "fp16" && type != "fp32") throw std::invalid_argument("no such type: " + type);
  if (address == 0) throw std::invalid_argument("no memory to view");
  const cuda::ExchangedType kind{brain ? cuda::kExchangeBfloat : cuda::kExchangeFloat,
                                 static_cast<uint8_t>(type == "fp32" ? 32 : 16), 1};
  const cuda::ExchangedDevice place = device < 0 ? cuda::ExchangedDevice{cuda::kExchangeCpu, 0}
                                                 : cuda::ExchangedDevice{cuda::kExchangeCuda, device};
  const auto destroy = [](PyObject* capsule) {
    if (!PyCapsule_IsValid(capsule, cuda::kUnusedCapsule)) return;
    auto* const managed =
        static_cast<cuda::ManagedArray*>(PyCapsule_GetPointer(capsule, cuda::kUnusedCapsule));
    managed->deleter(managed);
  };
  PyObject* const capsule =
      PyCapsule_New(cuda::view_memory(at(address), shape, kind, place), cuda::kUnusedCapsule, destroy);
  if (capsule == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(capsule);
}

}  // namespace

void bind_cuda(py::module_& m) {
  m.def("view_memory", &view_memory, "address"_a, "shape"_a, "type"_a, "device"_a);
  m.def(
      "cuda_send_layout",
      [](int64_t hidden, int64_t top_k, int64_t rows) {
        const cuda::SendLayout layout(hidden, top_k, rows);
        return py::make_tuple(layout.weights, layout.ids, layout.bytes);
      },
      "hidden"_a, "top_k"_a, "rows"_a);
  py::class_<cuda::Lane, std::shared_ptr<cuda::Lane>>(m, "CudaLane")
      .def(py::init(&make_lane), "layers"_a, "cudart"_a = "", "help"_a = false)
      .def(
          "split",
          [](cuda::Lane& self, const std::vector<int64_t>& deferred, const std::vector<int64_t>& skipped) {
            self.exchange().split(deferred, skipped);
          },
          "deferred"_a, "skipped"_a)
      .def(
          "bind",
          [](cuda::Lane& self, int layer, int64_t rows, bool decode, uintptr_t host_send,
             uintptr_t host_receive, bool partial) {
            return self.bind(layer, rows, decode, at(host_send), static_cast<float*>(at(host_receive)),
                             partial);
          },
          "layer"_a, "rows"_a, "decode"_a, "host_send"_a, "host_receive"_a, "partial"_a = false)
      .def(
          "submit",
          [](cuda::Lane& self, uintptr_t stream, int64_t call, uintptr_t device_send) {
            self.submit(at(stream), call, at(device_send));
          },
          "stream"_a, "call"_a, "device_send"_a, Release())
      .def(
          "collect",
          [](cuda::Lane& self, uintptr_t stream, int64_t call, uintptr_t device_out) {
            self.collect(at(stream), call, at(device_out));
          },
          "stream"_a, "call"_a, "device_out"_a, Release())
      .def(
          "copy",
          [](cuda::Lane& self, uintptr_t stream, uintptr_t dst, uintptr_t src, int64_t nbytes) {
            self.copy(at(stream), at(dst), at(src), nbytes);
          },
          "stream"_a, "dst"_a, "src"_a, "nbytes"_a, Release())
      .def(
          "synchronize", [](cuda::Lane& self, uintptr_t stream) { self.synchronize(at(stream)); }, "stream"_a,
          Release())
      .def(
          "check", [](cuda::Lane& self) { self.exchange().check(); }, Release())
      .def("stats", &stats)
      .def_property_readonly("cudart", [](const cuda::Lane& self) { return self.cudart().path; });
}

}  // namespace ktc
