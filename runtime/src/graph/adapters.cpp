#include "graph/adapters.h"

#include <utility>

#include "linear.h"
#include "moe.h"

namespace py = pybind11;

namespace ktc::graph {

namespace {

class PackedLinearAdapter final : public PackedLinear {
 public:
  explicit PackedLinearAdapter(std::shared_ptr<ktc::Linear> linear) : linear_(std::move(linear)) {}
  void* submit(const float* x, int64_t ld_x, int64_t rows, float* y, int64_t ld_y) override {
    return linear_->submit(x, ld_x, rows, y, ld_y);
  }
  void wait(void* ticket) override { linear_->wait(static_cast<Job*>(ticket)); }

 private:
  std::shared_ptr<ktc::Linear> linear_;
};

class MoeAdapter final : public Experts {
 public:
  explicit MoeAdapter(std::shared_ptr<ktc::Moe> moe) : moe_(std::move(moe)) {
    const MoeOptions& o = moe_->options();
    experts = o.experts;
    top_k = o.top_k;
    hidden = o.hidden;
  }
  int64_t submit(const float* x, int64_t rows, const int64_t* ids, const float* weights, int64_t k) override {
    return moe_->submit(x, hidden, rows, ids, weights, k);
  }
  void collect(int64_t ticket, float* out, int64_t) override { moe_->collect(ticket, out, hidden); }

 private:
  std::shared_ptr<ktc::Moe> moe_;
};

}  // namespace

std::shared_ptr<PackedLinear> adapt_linear(const py::object& object) {
  return std::make_shared<PackedLinearAdapter>(py::cast<std::shared_ptr<ktc::Linear>>(object));
}

std::shared_ptr<Experts> adapt_experts(const py::object& object) {
  if (py::isinstance<ktc::Moe>(object))
    return std::make_shared<MoeAdapter>(py::cast<std::shared_ptr<ktc::Moe>>(object));
  return py::cast<std::shared_ptr<Experts>>(object);
}

}  // namespace ktc::graph
