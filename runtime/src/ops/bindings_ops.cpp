// Single native operators for tests, over plain pointers: `ktc._runtime.ops`.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "graph/bindings_graph.h"
#include "graph/pool_adapter.h"
#include "ops/attention.h"
#include "ops/ops.h"
#include "pool.h"

namespace py = pybind11;
using namespace py::literals;

namespace ktc {

namespace {

using ops::DType;
using Ptr = uintptr_t;

const ops::Table& table(const std::string& isa) {
  const ops::Table* t = ops::table(isa.c_str());
  if (t == nullptr) throw std::invalid_argument("native operators '" + isa + "' cannot run on this machine");
  return *t;
}

DType dtype(const std::string& name) {
  if (name == "fp32") return DType::kF32;
  if (name == "bf16") return DType::kBF16;
  if (name == "fp16") return DType::kF16;
  throw std::invalid_argument("unknown data type '" + name + "'");
}

float* f(Ptr p) { return reinterpret_cast<float*>(p); }
int64_t* i(Ptr p) { return reinterpret_cast<int64_t*>(p); }
ops::Matrix matrix(Ptr p, const std::string& type, int64_t ld) {
  return {reinterpret_cast<const void*>(p), dtype(type), ld};
}
// Grows, and keeps what earlier calls left there: an operator must not depend on it.
float* scratch(int64_t floats) {
  thread_local std::vector<float> memory;
  if (memory.size() < static_cast<size_t>(floats)) memory.resize(static_cast<size_t>(floats));
  return memory.data();
}
ops::Parallel parallel(Pool* pool) { return graph::make_parallel(pool); }

}  // namespace

void bind_ops(py::module_& parent) {
  py::module_ m = parent.def_submodule("ops", "Single native operators, for tests.");
  m.def("available", [] {
    std::vector<std::string> names;
    for (const char* n : {"baseline", "avx2", "avx512", "avx512_bf16", "amx"})
      if (ops::table(n) != nullptr) names.emplace_back(n);
    return names;
  });
  m.def("chosen", [] {
    const ops::Table* t = ops::table();
    if (t == nullptr) throw std::invalid_argument("KTC_OPS_ISA names operators that this machine cannot run");
    return std::string(t->name);
  });
  parent.def("bf16_attention", [] {
    const ops::Table* t = ops::table();
    return t != nullptr && t->tiles_bf16 != nullptr;
  });
  m.def("gemm_nt",
        [](const std::string& isa, Ptr x, int64_t t, Ptr w, const std::string& type, int64_t n, int64_t k,
           Ptr bias, Ptr y) { table(isa).gemm_nt(f(x), k, t, matrix(w, type, k), n, k, f(bias), f(y), n); });
  m.def("gemm_nn", [](const std::string& isa, Ptr x, int64_t t, Ptr w, const std::string& type, int64_t k,
                      int64_t n, bool accumulate, Ptr y) {
    table(isa).gemm_nn(f(x), k, t, matrix(w, type, n), k, n, accumulate, f(y), n);
  });
  m.def("norm", [](const std::string& isa, Ptr x, Ptr a, Ptr b, Ptr sum, float scale, Ptr w, float eps,
                   int64_t cols, int64_t groups, int64_t rows, Ptr y) {
    table(isa).norm({f(x), f(a), f(b), f(sum), scale, f(w), eps, cols, groups, f(y)}, 0, rows);
  });
  m.def("embed", [](const std::string& isa, Ptr ids, int64_t rows, Ptr w, const std::string& type,
                    int64_t cols, float scale,
                    Ptr y) { table(isa).embed(i(ids), 0, rows, matrix(w, type, cols), cols, scale, f(y)); });
  m.def("rope_table",
        [](const std::string& isa, Ptr freq, int64_t half, float scaling, int64_t position, int64_t rows,
           Ptr c, Ptr s) { table(isa).rope_table(f(freq), half, scaling, position, 0, rows, f(c), f(s)); });
  m.def("rope", [](const std::string& isa, Ptr x, int64_t dim, int64_t half, Ptr c, Ptr s, int style, Ptr y) {
    table(isa).rope(f(x), dim, half, f(c), f(s), static_cast<ops::Rope>(style), f(y));
  });
  m.def("router", [](const std::string& isa, Ptr logits, int64_t rows, int score, int group_score,
                     int experts, int top_k, int n_group, int topk_group, Ptr choice_bias, bool renormalise,
                     float eps, float scale, Ptr weights, Ptr ids) {
    float* const memory = scratch(ops::router_scratch(experts, n_group));
    const ops::RouterArgs args{static_cast<ops::Score>(score),
                               static_cast<ops::GroupScore>(group_score),
                               experts,
                               top_k,
                               n_group,
                               topk_group,
                               f(choice_bias),
                               renormalise,
                               eps,
                               scale};
    table(isa).router(args, f(logits), 0, rows, memory, f(weights), i(ids));
  });
  m.def("silu_mul", [](const std::string& isa, Ptr g, Ptr u, int64_t n, Ptr y) {
    table(isa).silu_mul(f(g), f(u), n, f(y));
  });
  m.def("sigmoid_mul", [](const std::string& isa, Ptr g, Ptr x, int64_t cols, int64_t rows, Ptr y) {
    table(isa).sigmoid_mul(f(g), f(x), cols, 0, rows, f(y));
  });
  m.def(
      "gqa",
      [](const std::string& isa, Pool* pool, int64_t heads, int64_t kv_heads, int64_t head_dim,
         int64_t rotary_half, int64_t window, int rope, float scale, float norm_eps, float clip, Ptr q, Ptr k,
         Ptr v, Ptr cos, Ptr sin, Ptr q_norm, Ptr k_norm, Ptr sinks, Ptr k_cache, Ptr v_cache,
         int64_t context, int64_t position, int64_t rows, Ptr out, int prefill) {
        const ops::Parallel p = parallel(pool);
        const ops::GqaShape shape{heads,    kv_heads,
                                  head_dim, rotary_half,
                                  window,   static_cast<ops::Rope>(rope),
                                  scale,    norm_eps,
                                  clip,     static_cast<ops::Prefill>(prefill)};
        float* const memory = scratch(ops::gqa_scratch(shape, p.threads, rows));
        py::gil_scoped_release release;
        return ops::gqa(table(isa), p, shape,
                        {f(q), f(k), f(v), f(cos), f(sin), f(q_norm), f(k_norm), f(sinks), f(k_cache),
                         f(v_cache), context, position, rows, f(out), memory});
      },
      "isa"_a, "pool"_a.none(true), "heads"_a, "kv_heads"_a, "head_dim"_a, "rotary_half"_a, "window"_a,
      "rope"_a, "scale"_a, "norm_eps"_a, "clip"_a, "q"_a, "k"_a, "v"_a, "cos"_a, "sin"_a, "q_norm"_a,
      "k_norm"_a, "sinks"_a, "k_cache"_a, "v_cache"_a, "context"_a, "position"_a, "rows"_a, "out"_a,
      "prefill"_a = 0);
  m.def(
      "mla",
      [](const std::string& isa, Pool* pool, int64_t heads, int64_t nope, int64_t rope_dim, int64_t v_dim,
         int64_t rank, int rope, float scale, float norm_eps, Ptr q, Ptr kv, Ptr cos, Ptr sin, Ptr kv_norm,
         Ptr kv_b, const std::string& kv_b_type, Ptr cache, int64_t position, int64_t rows, Ptr out,
         int prefill) {
        const ops::Parallel p = parallel(pool);
        const ops::MlaShape shape{heads, nope,     rope_dim,
                                  v_dim, rank,     static_cast<ops::Rope>(rope),
                                  scale, norm_eps, static_cast<ops::Prefill>(prefill)};
        float* const memory = scratch(ops::mla_scratch(shape, p.threads, rows));
        py::gil_scoped_release release;
        return ops::mla(table(isa), p, shape,
                        {f(q), f(kv), f(cos), f(sin), f(kv_norm), matrix(kv_b, kv_b_type, rank), f(cache),
                         position, rows, f(out), memory});
      },
      "isa"_a, "pool"_a.none(true), "heads"_a, "nope"_a, "rope_dim"_a, "v_dim"_a, "rank"_a, "rope"_a,
      "scale"_a, "norm_eps"_a, "q"_a, "kv"_a, "cos"_a, "sin"_a, "kv_norm"_a, "kv_b"_a, "kv_b_type"_a,
      "cache"_a, "position"_a, "rows"_a, "out"_a, "prefill"_a = 0);
}

}  // namespace ktc
