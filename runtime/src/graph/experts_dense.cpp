// Routed experts from unpacked matrices; see experts.h.
#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "graph/experts.h"

namespace ktc::graph {

namespace {

class DenseExperts final : public Experts {
 public:
  DenseExperts(const DenseExpertsSpec& s, ops::Parallel parallel, const ops::Table* table,
               std::shared_ptr<DenseScratch> scratch)
      : s_(s), parallel_(parallel), table_(table), scratch_(std::move(scratch)) {
    experts = s.experts;
    top_k = s.top_k;
    hidden = s.hidden;
    DenseScratch& d = *scratch_;
    const auto grow = [](std::vector<float>& v, int64_t n) {
      v.resize(std::max(v.size(), static_cast<size_t>(n)));
    };
    grow(d.x, s.max_rows * s.hidden);
    grow(d.y, s.max_rows * s.hidden);
    grow(d.gate_up, s.max_rows * 2 * s.intermediate);
    grow(d.h, s.max_rows * s.intermediate);
    for (auto& r : d.results) grow(r, s.max_rows * s.hidden);
    d.token.resize(std::max(d.token.size(), static_cast<size_t>(s.max_rows)));
    grow(d.weight, s.max_rows);
  }

  int64_t submit(const float* x, int64_t rows, const int64_t* ids, const float* weights, int64_t k) override {
    DenseScratch& d = *scratch_;
    int ticket = 0;
    while (ticket < 3 && d.taken[ticket]) ++ticket;
    if (ticket == 3) throw std::logic_error("too many expert tickets outstanding");
    float* const out = d.results[ticket].data();
    std::fill_n(out, rows * hidden, 0.0f);
    for (int64_t e = 0; e < experts; ++e) {
      int64_t n = 0;
      for (int64_t t = 0; t < rows; ++t)
        for (int64_t slot = 0; slot < k; ++slot)
          if (ids[t * k + slot] == e) {
            d.token[static_cast<size_t>(n)] = t;
            d.weight[static_cast<size_t>(n)] = weights[t * k + slot];
            std::copy_n(x + t * hidden, hidden, d.x.data() + n * hidden);
            ++n;
          }
      if (n == 0) continue;
      const int64_t inner = s_.intermediate;
      product(d.x.data(), n, hidden, s_.gate_up, e, 2 * inner, s_.gate_up_bias, d.gate_up.data());
      activate(d.gate_up.data(), n, d.h.data());
      product(d.h.data(), n, inner, s_.down, e, hidden, s_.down_bias, d.y.data());
      for (int64_t r = 0; r < n; ++r) {
        float* const to = out + d.token[static_cast<size_t>(r)] * hidden;
        table_->axpby(to, 1.0f, d.y.data() + r * hidden, d.weight[static_cast<size_t>(r)], hidden, to);
      }
    }
    d.taken[ticket] = true;
    return ticket;
  }

  void collect(int64_t ticket, float* out, int64_t rows) override {
    std::copy_n(scratch_->results[ticket].data(), rows * hidden, out);
    scratch_->taken[ticket] = false;
  }

 private:
  // y [rows][n] = x [rows][k] times expert e's matrix, [n][k] or transposed [k][n].
  void product(const float* x, int64_t rows, int64_t k, const void* base, int64_t e, int64_t n,
               const float* bias, float* y) {
    const float* const b = bias ? bias + e * n : nullptr;
    const ops::Matrix w{base, s_.dtype, s_.transposed ? n : k};
    const ops::Matrix mine = w.rows(e * (s_.transposed ? k : n));
    const int64_t grain = std::max<int64_t>(1, (1 << 11) / std::max<int64_t>(1, rows * k / 32));
    ops::parallel_range(parallel_, (n + 31) / 32, grain, [&](int64_t lo, int64_t hi, int) {
      const int64_t begin = lo * 32, end = std::min(n, hi * 32);
      if (!s_.transposed) {
        table_->gemm_nt(x, k, rows, mine.rows(begin), end - begin, k, b ? b + begin : nullptr, y + begin, n);
        return;
      }
      const int64_t size = s_.dtype == ops::DType::kF32 ? 4 : 2;
      const ops::Matrix columns{static_cast<const char*>(mine.data) + begin * size, s_.dtype, n};
      table_->gemm_nn(x, k, rows, columns, k, end - begin, false, y + begin, n);
      for (int64_t r = 0; b && r < rows; ++r)
        for (int64_t i = begin; i < end; ++i) y[r * n + i] += b[i];
    });
  }

  void activate(float* gate_up, int64_t rows, float* h) {
    const int64_t inner = s_.intermediate;
    for (int64_t r = 0; r < rows; ++r) {
      float* const row = gate_up + r * 2 * inner;
      for (int64_t i = 0; i < inner; ++i) {
        float g = s_.interleaved ? row[2 * i] : row[i];
        float u = s_.interleaved ? row[2 * i + 1] : row[inner + i];
        if (s_.activation != Activation::kSiluMul) {
          g = g > s_.limit ? s_.limit : g;
          u = u > s_.limit ? s_.limit : u < -s_.limit ? -s_.limit : u;
        }
        if (s_.activation == Activation::kSwigluOai)
          h[r * inner + i] = (u + 1.0f) * (g / (1.0f + std::exp(-g * s_.alpha)));
        else
          h[r * inner + i] = g / (1.0f + std::exp(-g)) * u;
      }
    }
  }

  DenseExpertsSpec s_;
  ops::Parallel parallel_;
  const ops::Table* table_;
  std::shared_ptr<DenseScratch> scratch_;
};

}  // namespace

std::shared_ptr<Experts> make_dense_experts(const DenseExpertsSpec& spec, ops::Parallel parallel,
                                            const ops::Table* table, std::shared_ptr<DenseScratch> scratch) {
  return std::make_shared<DenseExperts>(spec, parallel, table, std::move(scratch));
}

}  // namespace ktc::graph
