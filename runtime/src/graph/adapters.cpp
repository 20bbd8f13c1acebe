#include "graph/adapters.h"

#include <stdexcept>
#include <utility>
#include <vector>

#include "linear.h"
#include "moe.h"

namespace py = pybind11;

namespace ktc::graph {

namespace {

class PackedLinearAdapter final : public PackedLinear {
 public:
  explicit PackedLinearAdapter(std::shared_ptr<ktc::Linear> linear) : linear_(std::move(linear)) {}
  void forward(const float* x, int64_t ld_x, int64_t rows, float* y, int64_t ld_y) override {
    linear_->forward(x, ld_x, rows, y, ld_y);
  }

 private:
  std::shared_ptr<ktc::Linear> linear_;
};

// One Moe per number of slots in use: the whole layer's first, then what deferring or skipping leaves.
class MoeAdapter final : public Experts {
 public:
  explicit MoeAdapter(std::vector<std::shared_ptr<ktc::Moe>> by_slots) : by_slots_(std::move(by_slots)) {
    const MoeOptions& o = by_slots_.at(0)->options();
    experts = o.experts;
    top_k = o.top_k;
    hidden = o.hidden;
  }
  int64_t submit(const float* x, int64_t rows, const int64_t* ids, const float* weights, int64_t k) override {
    for (size_t i = 0; i < by_slots_.size(); ++i)
      if (by_slots_[i]->options().top_k == k)
        return by_slots_[i]->submit(x, hidden, rows, ids, weights) * count() + static_cast<int64_t>(i);
    throw std::logic_error("experts were not built for " + std::to_string(k) + " slots a token");
  }
  void collect(int64_t ticket, float* out, int64_t) override {
    by_slots_[static_cast<size_t>(ticket % count())]->collect(ticket / count(), out, hidden);
  }

 private:
  int64_t count() const { return static_cast<int64_t>(by_slots_.size()); }
  std::vector<std::shared_ptr<ktc::Moe>> by_slots_;
};

}  // namespace

std::shared_ptr<PackedLinear> adapt_linear(const py::object& object) {
  return std::make_shared<PackedLinearAdapter>(py::cast<std::shared_ptr<ktc::Linear>>(object));
}

std::shared_ptr<Experts> adapt_experts(const py::object& object) {
  if (py::isinstance<py::sequence>(object)) {
    std::vector<std::shared_ptr<ktc::Moe>> list;
    for (const py::handle item : object) list.push_back(py::cast<std::shared_ptr<ktc::Moe>>(item));
    return std::make_shared<MoeAdapter>(std::move(list));
  }
  return py::cast<std::shared_ptr<Experts>>(object);
}

}  // namespace ktc::graph
