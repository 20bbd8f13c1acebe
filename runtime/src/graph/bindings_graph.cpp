// Python bindings of the graph executor. A program is turned into calls of `add` by ktc/graph/build.py.
#include "graph/bindings_graph.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "graph/adapters.h"
#include "graph/executor.h"
#include "graph/pool_adapter.h"
#include "graph/routing_counter.h"
#include "graph/table_file.h"
#include "pool.h"

namespace py = pybind11;
using namespace py::literals;

namespace ktc {

namespace {

using graph::Executor;
using Ids = py::array_t<int64_t, py::array::c_style>;
using Logits = py::array_t<float, py::array::c_style>;

ops::DType dtype(const std::string& name) {
  if (name == "fp32") return ops::DType::kF32;
  if (name == "bf16") return ops::DType::kBF16;
  if (name == "fp16") return ops::DType::kF16;
  throw std::invalid_argument("unknown data type '" + name + "'");
}

std::shared_ptr<Executor> make_executor(
    Pool* pool, const std::vector<std::pair<std::string, int64_t>>& buffers,
    const std::vector<int64_t>& states,
    const std::vector<std::tuple<int64_t, int64_t, std::vector<int64_t>>>& layouts, int64_t context,
    int64_t vocab, int n_deferred, int n_skipped, bool trivial, const std::string& isa) {
  std::vector<graph::BufferSpec> specs;
  for (const auto& [rows, bytes] : buffers)
    specs.push_back({rows == "R" ? graph::Rows::kLogits : graph::Rows::kTokens, bytes});
  std::vector<graph::Layout> places;
  for (const auto& [rows, bytes, offsets] : layouts) places.push_back({rows, bytes, offsets});
  graph::Options options;
  options.context = context;
  options.vocab = vocab;
  options.n_deferred = n_deferred;
  options.n_skipped = n_skipped;
  options.trivial = trivial;
  return std::make_shared<Executor>(graph::make_parallel(pool), std::move(specs), states, std::move(places),
                                    options, isa.c_str());
}

using WeightTuple = std::tuple<uintptr_t, std::string, int64_t, int64_t>;

void add(Executor& e, const std::string& op, const std::string& name, const std::vector<int>& inputs,
         const std::vector<int>& outputs, const std::vector<int>& states,
         const std::map<std::string, double>& params, const std::map<std::string, WeightTuple>& weights,
         const py::object& linear, const py::object& experts, const py::object& callback,
         std::shared_ptr<graph::TableFile> table) {
  graph::NodeSpec s;
  s.op = op;
  s.name = name;
  s.inputs = inputs;
  s.outputs = outputs;
  s.states = states;
  s.params = params;
  for (const auto& [role, w] : weights)
    s.weights[role] = {reinterpret_cast<const void*>(std::get<0>(w)), dtype(std::get<1>(w)), std::get<2>(w),
                       std::get<3>(w)};
  if (!linear.is_none()) s.linear = graph::adapt_linear(linear);
  if (!experts.is_none()) s.experts = graph::adapt_experts(experts);
  s.table = std::move(table);
  if (!callback.is_none()) {
    const int64_t cols = static_cast<int64_t>(s.param("cols"));
    // Held by pointer: the last reference may go without the GIL otherwise.
    auto function = std::shared_ptr<py::function>(
        new py::function(py::reinterpret_borrow<py::function>(callback)), [](py::function* f) {
          py::gil_scoped_acquire gil;
          delete f;
        });
    s.callback = [function, cols](const float* x, float* y, int64_t rows, int64_t position) {
      py::gil_scoped_acquire gil;
      (*function)(reinterpret_cast<uintptr_t>(x), reinterpret_cast<uintptr_t>(y), rows, cols, position);
    };
  }
  e.add(s);
}

void step(Executor& e, const Ids& ids, int64_t position, bool decode, Logits& logits) {
  if (ids.ndim() != 1) throw std::invalid_argument("ids must have one dimension");
  if (logits.ndim() != 2 || logits.shape(1) != e.options().vocab)
    throw std::invalid_argument("logits must be [rows, " + std::to_string(e.options().vocab) + "]");
  const int64_t* const in = ids.data();
  const int64_t rows = ids.shape(0), logit_rows = logits.shape(0);
  float* const out = logits.mutable_data();
  py::gil_scoped_release release;
  e.step(in, rows, position, decode, logit_rows, out);
}

std::shared_ptr<graph::Experts> dense_experts(Executor& e,
                                              const std::shared_ptr<graph::DenseScratch>& scratch,
                                              int64_t experts, int64_t top_k, int64_t hidden,
                                              int64_t intermediate, int activation, float alpha, float limit,
                                              const WeightTuple& gate_up, const WeightTuple& down,
                                              bool transposed, bool interleaved, uintptr_t gate_up_bias,
                                              uintptr_t down_bias, const std::string& isa) {
  graph::DenseExpertsSpec s{};
  s.experts = experts;
  s.top_k = top_k;
  s.hidden = hidden;
  s.intermediate = intermediate;
  s.max_rows = e.max_rows();
  s.activation = static_cast<graph::Activation>(activation);
  s.alpha = alpha;
  s.limit = limit;
  s.gate_up = reinterpret_cast<const void*>(std::get<0>(gate_up));
  s.down = reinterpret_cast<const void*>(std::get<0>(down));
  s.dtype = dtype(std::get<1>(gate_up));
  if (dtype(std::get<1>(down)) != s.dtype)
    throw std::invalid_argument("gate_up and down differ in data type");
  s.transposed = transposed;
  s.interleaved = interleaved;
  s.gate_up_bias = reinterpret_cast<const float*>(gate_up_bias);
  s.down_bias = reinterpret_cast<const float*>(down_bias);
  return graph::make_dense_experts(s, e.parallel(), ops::table(isa.c_str()), scratch);
}

}  // namespace

void bind_graph(py::module_& m) {
  bind_ops(m);
  py::class_<graph::Experts, std::shared_ptr<graph::Experts>>(m, "GraphExperts");
  py::class_<graph::DenseScratch, std::shared_ptr<graph::DenseScratch>>(m, "DenseScratch").def(py::init<>());
  using graph::TableFile;
  py::class_<TableFile, std::shared_ptr<TableFile>>(m, "TableFile")
      .def(py::init([](const std::string& path, const std::string& tensor, int64_t offset,
                       const std::string& type, int64_t rows, int64_t cols) {
             return std::make_shared<TableFile>(path, tensor, offset, dtype(type), rows, cols);
           }),
           "path"_a, "tensor"_a, "offset"_a, "dtype"_a, "rows"_a, "cols"_a);
  py::class_<Executor, std::shared_ptr<Executor>>(m, "Executor")
      .def(py::init(&make_executor), py::keep_alive<1, 2>(), "pool"_a.none(true), "buffers"_a, "states"_a,
           "layouts"_a, "context"_a, "vocab"_a, "n_deferred"_a = -1, "n_skipped"_a = 0, "trivial"_a = false,
           "isa"_a = "")
      .def("add", &add, "op"_a, "name"_a, "inputs"_a, "outputs"_a, "states"_a, "params"_a, "weights"_a,
           "linear"_a = py::none(), "experts"_a = py::none(), "callback"_a = py::none(),
           "table"_a = py::none())
      .def("dense_experts", &dense_experts, "scratch"_a, py::kw_only(), "experts"_a, "top_k"_a, "hidden"_a,
           "intermediate"_a, "activation"_a, "alpha"_a, "limit"_a, "gate_up"_a, "down"_a, "transposed"_a,
           "interleaved"_a, "gate_up_bias"_a = 0, "down_bias"_a = 0, "isa"_a = "")
      .def("step", &step, "ids"_a, "position"_a, "decode"_a, "logits"_a)
      .def("set_deferral", &Executor::set_deferral, "n_deferred"_a, "n_skipped"_a)
      .def("profile", &Executor::profile, "on"_a)
      .def("times",
           [](const Executor& e) {
             py::dict out;
             for (const Executor::OpTime& t : e.times())
               out[t.op.c_str()] = py::make_tuple(t.nanoseconds, t.calls);
             return out;
           })
      .def_property_readonly("arena_bytes", &Executor::arena_bytes)
      .def_property_readonly("arena",
                             [](const Executor& e) { return reinterpret_cast<uintptr_t>(e.arena()); })
      .def_property_readonly("state_bytes", &Executor::state_bytes)
      .def_property_readonly("max_rows", &Executor::max_rows)
      .def_property_readonly("has_bf16", &Executor::has_bf16)
      .def_property_readonly("isa", [](const Executor& e) { return std::string(e.isa()); });
  using graph::RoutingCounter;
  py::class_<RoutingCounter, std::shared_ptr<RoutingCounter>>(m, "RoutingCounter")
      .def(py::init([](std::shared_ptr<Executor> executor,
                       const std::vector<std::tuple<size_t, int, int64_t, int64_t>>& blocks) {
             std::vector<RoutingCounter::Block> list;
             for (const auto& [submit, ids, top_k, experts] : blocks)
               list.push_back({submit, ids, top_k, experts});
             return std::make_shared<RoutingCounter>(std::move(executor), list);
           }),
           "executor"_a, "blocks"_a)
      .def("counts", &RoutingCounter::counts);
  bind_emulate(m);
  m.def(
      "graph_scratch",
      [](const std::string& op, const std::map<std::string, double>& p, int threads,
         int64_t rows) -> int64_t {
        const auto get = [&](const char* key) {
          const auto it = p.find(key);
          return it == p.end() ? int64_t{0} : static_cast<int64_t>(it->second);
        };
        if (op == "gqa") {
          ops::GqaShape s{};
          s.heads = get("heads");
          s.kv_heads = get("kv_heads");
          s.head_dim = get("head_dim");
          s.prefill = get("bf16") ? ops::Prefill::kBF16 : ops::Prefill::kF32;
          return 4 * ops::gqa_scratch(s, threads, rows);
        }
        if (op == "mla") {
          ops::MlaShape s{};
          s.heads = get("heads");
          s.rank = get("rank");
          s.rope_dim = get("rope_dim");
          s.nope = get("nope");
          s.v_dim = get("v_dim");
          s.prefill = get("bf16") ? ops::Prefill::kBF16 : ops::Prefill::kF32;
          return 4 * ops::mla_scratch(s, threads, rows);
        }
        if (op == "router")
          return 4 * threads * ops::router_scratch(get("experts"), std::max<int64_t>(1, get("n_group")));
        throw std::invalid_argument("operator '" + op + "' has no scratch");
      },
      "op"_a, "params"_a, "threads"_a, "rows"_a);
}

}  // namespace ktc
