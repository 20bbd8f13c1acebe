// Python bindings: kernel libraries, threads, memory, operators. Pointers are plain integers.
#include "bindings.h"

#include <pybind11/stl.h>

#include <map>

#include "huge_buffer.h"
#include "kernel_lib.h"
#include "linear.h"
#include "moe.h"
#include "pool.h"

namespace py = pybind11;
using namespace py::literals;

namespace ktc {
namespace {

using Release = py::call_guard<py::gil_scoped_release>;

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

py::list kernel_records(const KernelLib& lib) {
  py::list records;
  for (const ktc_gemm_kernel* k : lib.kernels()) {
    records.append(py::dict("name"_a = k->name, "format"_a = format_name(k->format),
                            "scale"_a = scale_name(k->scale), "epilogue"_a = epilogue_name(k->epilogue),
                            "group"_a = k->group, "k"_a = k->k, "min_rows"_a = k->min_rows));
  }
  return records;
}

py::dict report(const std::vector<KernelChoice::Use>& uses, const Pool& pool) {
  py::dict kernels;
  for (const KernelChoice::Use& use : uses) kernels[py::str(use.name)] = use.calls;
  return py::dict("kernels"_a = kernels, "threads"_a = pool.threads(), "nodes"_a = pool.nodes());
}

ktc_epilogue activation_from(const std::string& name) {
  for (int e = KTC_SILU_MUL; e <= KTC_SWIGLU_OAI; ++e)
    if (name == epilogue_name(e)) return static_cast<ktc_epilogue>(e);
  throw std::invalid_argument("unknown activation '" + name + "'");
}

Schedule schedule_from(const std::string& name) {
  if (name == "dynamic") return Schedule::kDynamic;
  if (name == "static") return Schedule::kStatic;
  throw std::invalid_argument("scheduling must be 'dynamic' or 'static', not '" + name + "'");
}

using NodePointers = std::vector<std::map<std::string, uintptr_t>>;

ktc_weight weight_from(const std::map<std::string, uintptr_t>& pointers, const std::string& prefix) {
  const auto get = [&](const std::string& name) -> uintptr_t {
    const auto it = pointers.find(name);
    return it == pointers.end() ? 0 : it->second;
  };
  return ktc_weight{at<const uint8_t>(get(prefix)), at<const float>(get(prefix + "_scale")),
                    at<const uint8_t>(get(prefix + "_mult")), at<const float>(get(prefix + "_bias"))};
}

std::shared_ptr<Moe> make_moe(std::shared_ptr<KernelLib> lib, std::shared_ptr<Pool> pool, int64_t experts,
                              int64_t top_k, int64_t hidden, int64_t intermediate,
                              const std::string& activation, float alpha, float limit,
                              const std::string& data_type, const std::string& scale, int64_t group,
                              const std::vector<std::pair<int64_t, int64_t>>& splits,
                              const std::vector<NodePointers>& weights, const std::string& force,
                              const std::string& scheduling, const MinRows& min_rows) {
  MoeOptions o;
  o.experts = experts;
  o.top_k = top_k;
  o.hidden = hidden;
  o.intermediate = intermediate;
  o.activation = activation_from(activation);
  o.alpha = alpha;
  o.limit = limit;
  o.scheme = Scheme::from_names(data_type, scale, group);
  o.force = force;
  o.min_rows = min_rows;
  o.schedule = schedule_from(scheduling);
  if (splits.size() != weights.size())
    throw std::invalid_argument("moe: " + std::to_string(splits.size()) + " splits but weights of " +
                                std::to_string(weights.size()) + " nodes");
  for (size_t n = 0; n < splits.size(); ++n) {
    MoeNode node;
    node.begin = splits[n].first;
    node.end = splits[n].second;
    for (const auto& pointers : weights[n]) {
      node.gate_up.push_back(weight_from(pointers, "gate_up"));
      node.down.push_back(weight_from(pointers, "down"));
    }
    o.nodes.push_back(std::move(node));
  }
  py::gil_scoped_release release;
  return std::make_shared<Moe>(std::move(lib), std::move(pool), std::move(o));
}

std::shared_ptr<Linear> make_linear(std::shared_ptr<KernelLib> lib, std::shared_ptr<Pool> pool, int64_t n,
                                    int64_t k, const std::string& data_type, const std::string& scale,
                                    int64_t group, uintptr_t tiles, uintptr_t scale_ptr, uintptr_t mult,
                                    uintptr_t bias, const std::string& force, const MinRows& min_rows) {
  const ktc_weight weight{at<const uint8_t>(tiles), at<const float>(scale_ptr), at<const uint8_t>(mult),
                          at<const float>(bias)};
  return std::make_shared<Linear>(std::move(lib), std::move(pool), n, k,
                                  Scheme::from_names(data_type, scale, group), weight, force, min_rows);
}

void bind_operators(py::module_& m) {
  py::class_<Linear, std::shared_ptr<Linear>>(m, "Linear")
      .def(py::init(&make_linear), "lib"_a, "pool"_a, "n"_a, "k"_a, "data_type"_a, "scale"_a, "group"_a,
           "tiles"_a, "scale_ptr"_a, "mult"_a, "bias"_a, "force"_a = "", "min_rows"_a = MinRows{})
      .def(
          "forward",
          [](Linear& self, uintptr_t x, int64_t ld_x, int64_t m, uintptr_t y, int64_t ld_y) {
            self.forward(at<const float>(x), ld_x, m, at<float>(y), ld_y);
          },
          "x"_a, "ld_x"_a, "m"_a, "y"_a, "ld_y"_a, Release())
      .def("report", [](const Linear& self) { return report(self.kernels().report(), self.pool()); });

  py::class_<Moe, std::shared_ptr<Moe>>(m, "Moe")
      .def(py::init(&make_moe), "lib"_a, "pool"_a, py::kw_only(), "experts"_a, "top_k"_a, "hidden"_a,
           "intermediate"_a, "activation"_a, "alpha"_a, "limit"_a, "data_type"_a, "scale"_a, "group"_a,
           "splits"_a, "weights"_a, "force"_a = "", "scheduling"_a = "dynamic", "min_rows"_a = MinRows{})
      .def(
          "submit",
          [](Moe& self, uintptr_t x, int64_t ld_x, int64_t tokens, uintptr_t ids, uintptr_t weights,
             int64_t k) {
            return self.submit(at<const float>(x), ld_x, tokens, at<const int64_t>(ids),
                               at<const float>(weights), k);
          },
          "x"_a, "ld_x"_a, "tokens"_a, "ids"_a, "weights"_a, "k"_a = 0, Release())
      .def(
          "collect",
          [](Moe& self, int64_t ticket, uintptr_t out, int64_t ld_out) {
            self.collect(ticket, at<float>(out), ld_out);
          },
          "ticket"_a, "out"_a, "ld_out"_a, Release())
      .def(
          "forward",
          [](Moe& self, uintptr_t x, int64_t ld_x, int64_t tokens, uintptr_t ids, uintptr_t weights,
             uintptr_t out, int64_t ld_out) {
            self.forward(at<const float>(x), ld_x, tokens, at<const int64_t>(ids), at<const float>(weights),
                         at<float>(out), ld_out);
          },
          "x"_a, "ld_x"_a, "tokens"_a, "ids"_a, "weights"_a, "out"_a, "ld_out"_a, Release())
      .def("scratch_bytes", &Moe::scratch_bytes, "tokens"_a)
      .def_property_readonly("chunk_tokens", &Moe::chunk_tokens)
      .def("report", [](const Moe& self) {
        py::dict d = report(self.report(), self.pool());
        d["scheduling"] = self.options().schedule == Schedule::kDynamic ? "dynamic" : "static";
        d["chunk_tokens"] = self.chunk_tokens();
        d["min_rows"] = self.min_rows();
        return d;
      });
}

}  // namespace

void bind_run(py::module_& m) {
  py::class_<KernelLib, std::shared_ptr<KernelLib>>(m, "KernelLib")
      .def(py::init<const std::string&>(), "path"_a)
      .def_property_readonly("variant", [](const KernelLib& l) { return l.raw()->variant; })
      .def_property_readonly("source_key", [](const KernelLib& l) { return l.raw()->source_key; })
      .def_property_readonly("required_features", &KernelLib::required_features)
      .def("kernels", &kernel_records);

  py::class_<Pool, std::shared_ptr<Pool>>(m, "Pool")
      .def(py::init<const std::vector<std::vector<int>>&, bool, bool>(), "nodes"_a, "pin"_a = true,
           "caller_works"_a = true)
      .def_property_readonly("threads", &Pool::threads)
      .def_property_readonly("nodes", &Pool::nodes)
      .def_property_readonly("caller_works", &Pool::caller_works)
      .def("warnings", &Pool::warnings);

  py::class_<HugeBuffer, std::shared_ptr<HugeBuffer>>(m, "HugeBuffer")
      .def(py::init<int64_t, int>(), "nbytes"_a, "node"_a = -1)
      .def_property_readonly("ptr", [](const HugeBuffer& b) { return reinterpret_cast<uintptr_t>(b.data()); })
      .def_property_readonly("nbytes", &HugeBuffer::size)
      .def_property_readonly("node_id", &HugeBuffer::node_id)
      .def(
          "read_file",
          [](HugeBuffer& self, const std::string& path, int64_t file_offset, int64_t nbytes,
             int64_t dst_offset,
             std::shared_ptr<Pool> pool) { self.read_file(path, file_offset, nbytes, dst_offset, *pool); },
          "path"_a, "file_offset"_a, "nbytes"_a, "dst_offset"_a, "pool"_a, Release())
      .def("huge_bytes", &HugeBuffer::huge_bytes, Release())
      .def("close", &HugeBuffer::close);

  bind_operators(m);
}

}  // namespace ktc
