// The nodes of the decode graph except attention's and the routed experts': thin adapters from buffers to
// operators.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "graph/node_params.h"

namespace ktc::graph {

namespace {

using ops::Matrix;

// Rows of y = x W^T + b, cut by columns of y: every thread streams its own rows of W.
void dense(const Step& st, const float* x, int64_t rows, int64_t k, Matrix w, int64_t n, const float* bias,
           float* y) {
  const int64_t work = rows * k,
                grain = std::max<int64_t>(32, ((1 << 16) / std::max<int64_t>(work, 1)) / 32 * 32);
  ops::parallel_range(*st.parallel, (n + 31) / 32, grain / 32, [&](int64_t lo, int64_t hi, int) {
    const int64_t begin = lo * 32, end = std::min(n, hi * 32);
    st.table->gemm_nt(x, k, rows, w.rows(begin), end - begin, k, bias ? bias + begin : nullptr, y + begin, n);
  });
}

class Embed final : public Node {
 public:
  explicit Embed(const NodeSpec& s)
      : out_(output(s)), table_(s.need("weight")), scale_(static_cast<float>(s.param("scale", 1.0))) {}
  void run(const Step& st) override {
    st.table->embed(st.ids, 0, st.rows, table_.matrix(), table_.cols, scale_, st.at(out_));
  }

 private:
  int out_;
  WeightRef table_;
  float scale_;
};

class RopeTable final : public Node {
 public:
  explicit RopeTable(const NodeSpec& s)
      : cos_(output(s, 0)),
        sin_(output(s, 1)),
        half_(s.need("inv_freq").cols),
        freq_(s.need("inv_freq").f32("inv_freq")),
        scaling_(static_cast<float>(s.param("scaling", 1.0))) {}
  void run(const Step& st) override {
    float* const c = st.at(cos_);
    float* const n = st.at(sin_);
    ops::parallel_range(*st.parallel, st.rows, 64, [&](int64_t lo, int64_t hi, int) {
      st.table->rope_table(freq_, half_, scaling_, st.position, lo, hi, c, n);
    });
  }

 private:
  int cos_, sin_;
  int64_t half_;
  const float* freq_;
  float scaling_;
};

// inputs x, or x and one or two deltas; outputs y, or y and the sum.
class RmsNorm final : public Node {
 public:
  RmsNorm(const NodeSpec& s, Rows rows)
      : rows_(rows),
        x_(input(s, 0)),
        a_(s.inputs.size() > 1 ? s.inputs[1] : -1),
        b_(s.inputs.size() > 2 ? s.inputs[2] : -1),
        y_(output(s, 0)),
        sum_(a_ >= 0 ? output(s, 1) : -1),
        weight_(s.need("weight").f32("norm weight")),
        cols_(integer(s, "cols")),
        groups_(static_cast<int64_t>(s.param("groups", 1))),
        eps_(static_cast<float>(s.param("eps"))),
        scale_(static_cast<float>(s.param("scale", 1.0))) {}
  void run(const Step& st) override {
    const ops::NormArgs args{st.at(x_),
                             a_ >= 0 ? st.at(a_) : nullptr,
                             b_ >= 0 ? st.at(b_) : nullptr,
                             sum_ >= 0 ? st.at(sum_) : nullptr,
                             scale_,
                             weight_,
                             eps_,
                             cols_,
                             groups_,
                             st.at(y_)};
    const int64_t grain = std::max<int64_t>(1, (1 << 15) / (cols_ * groups_));
    ops::parallel_range(*st.parallel, st.rows_of(rows_), grain,
                        [&](int64_t lo, int64_t hi, int) { st.table->norm(args, lo, hi); });
  }

 private:
  Rows rows_;
  int x_, a_, b_, y_, sum_;
  const float* weight_;
  int64_t cols_, groups_;
  float eps_, scale_;
};

class Linear final : public Node {
 public:
  Linear(const NodeSpec& s, Rows rows, Executor& e)
      : mail_(e.mailbox()),
        rows_(rows),
        x_(input(s, 0)),
        y_(output(s)),
        n_(integer(s, "n")),
        k_(integer(s, "k")),
        packed_(s.linear) {
    if (packed_) {
      mail_.linears.reserve(8);
      return;
    }
    weight_ = s.need("weight").matrix();
    if (const WeightRef* b = s.weight("bias")) bias_ = b->f32("bias");
  }
  void run(const Step& st) override {
    if (st.trivial) {  // plain numbers: what else shares this place in the arena may look like denormals
      std::fill_n(st.at(y_), st.rows_of(rows_) * n_, 0.5f);
      return;
    }
    const int64_t rows = st.rows_of(rows_);
    if (!packed_) return dense(st, st.at(x_), rows, k_, weight_, n_, bias_, st.at(y_));
    mail_.linears.push_back({packed_.get(), packed_->submit(st.at(x_), k_, rows, st.at(y_), n_)});
    if (!followed_ || !st.together) mail_.finish_linears();
  }
  void followed() override { followed_ = true; }

 private:
  Mailbox& mail_;
  bool followed_ = false;
  Rows rows_;
  int x_, y_;
  int64_t n_, k_;
  std::shared_ptr<PackedLinear> packed_;
  Matrix weight_;
  const float* bias_ = nullptr;
};

class SiluMul final : public Node {
 public:
  explicit SiluMul(const NodeSpec& s)
      : gate_(input(s, 0)), up_(input(s, 1)), y_(output(s)), cols_(integer(s, "cols")) {}
  void run(const Step& st) override {
    const float* const g = st.at(gate_);
    const float* const u = st.at(up_);
    float* const y = st.at(y_);
    ops::parallel_range(*st.parallel, st.rows * cols_ / 16 + 1, 1 << 10, [&](int64_t lo, int64_t hi, int) {
      const int64_t begin = lo * 16, end = std::min(hi * 16, st.rows * cols_);
      if (begin < end) st.table->silu_mul(g + begin, u + begin, end - begin, y + begin);
    });
  }

 private:
  int gate_, up_, y_;
  int64_t cols_;
};

// y = sigmoid(g) * x, g one number a row.
class SigmoidMul final : public Node {
 public:
  explicit SigmoidMul(const NodeSpec& s)
      : g_(input(s, 0)), x_(input(s, 1)), y_(output(s)), cols_(integer(s, "cols")) {}
  void run(const Step& st) override {
    st.table->sigmoid_mul(st.at(g_), st.at(x_), cols_, 0, st.rows, st.at(y_));
  }

 private:
  int g_, x_, y_;
  int64_t cols_;
};

// The last R of T rows.
class LastRows final : public Node {
 public:
  explicit LastRows(const NodeSpec& s) : x_(input(s, 0)), y_(output(s)), cols_(integer(s, "cols")) {}
  void run(const Step& st) override {
    std::memcpy(st.at(y_), st.at(x_) + (st.rows - st.logit_rows) * cols_,
                static_cast<size_t>(st.logit_rows * cols_) * sizeof(float));
  }

 private:
  int x_, y_;
  int64_t cols_;
};

// In place on the logits: y = x * scale.
class Scale final : public Node {
 public:
  Scale(const NodeSpec& s, Rows rows)
      : rows_(rows),
        x_(input(s, 0)),
        y_(output(s)),
        cols_(integer(s, "cols")),
        divisor_(static_cast<float>(s.param("divisor", 1.0))) {}
  void run(const Step& st) override {
    const float* const x = st.at(x_);
    float* const y = st.at(y_);
    const int64_t count = st.rows_of(rows_) * cols_;
    for (int64_t i = 0; i < count; ++i) y[i] = x[i] / divisor_;
  }

 private:
  Rows rows_;
  int x_, y_;
  int64_t cols_;
  float divisor_;
};

// outputs weights [T][k] f32, ids [T][k] i64, scratch (logits and per-thread choice scratch).
class Router final : public Node {
 public:
  explicit Router(const NodeSpec& s)
      : x_(input(s, 0)),
        weights_(output(s, 0)),
        ids_(output(s, 1)),
        logits_(output(s, 2)),
        choice_(output(s, 3)),
        matrix_(s.need("weight").matrix()),
        hidden_(integer(s, "hidden")) {
    if (const WeightRef* b = s.weight("bias")) bias_ = b->f32("router bias");
    const WeightRef* choice = s.weight("choice_bias");
    args_ = {static_cast<ops::Score>(integer(s, "score")),
             static_cast<ops::GroupScore>(integer(s, "group_score")),
             static_cast<int32_t>(s.param("experts")),
             static_cast<int32_t>(s.param("top_k")),
             static_cast<int32_t>(s.param("n_group", 1)),
             static_cast<int32_t>(s.param("topk_group", 1)),
             choice ? choice->f32("choice bias") : nullptr,
             static_cast<int32_t>(s.param("renormalise", 0)),
             static_cast<float>(s.param("renormalise_eps", 0.0)),
             static_cast<float>(s.param("scale", 1.0))};
    if (args_.top_k > args_.experts || args_.top_k < 1 || args_.n_group < 1 || args_.experts % args_.n_group)
      throw std::invalid_argument(s.name + ": router parameters do not fit together");
    per_thread_ = ops::router_scratch(args_.experts, args_.n_group);
  }
  void run(const Step& st) override {
    float* const logits = st.at(logits_);
    if (!st.trivial) dense(st, st.at(x_), st.rows, hidden_, matrix_, args_.experts, bias_, logits);
    float* const choice = st.at(choice_);
    float* const weights = st.at(weights_);
    int64_t* const ids = st.at<int64_t>(ids_);
    ops::parallel_range(*st.parallel, st.rows, 8, [&](int64_t lo, int64_t hi, int thread) {
      st.table->router(args_, logits, lo, hi, choice + thread * per_thread_, weights, ids);
    });
  }

 private:
  int x_, weights_, ids_, logits_, choice_;
  Matrix matrix_;
  int64_t hidden_, per_thread_ = 0;
  const float* bias_ = nullptr;
  ops::RouterArgs args_;
};

class CallbackNode final : public Node {
 public:
  explicit CallbackNode(const NodeSpec& s) : x_(input(s, 0)), y_(output(s)), callback_(s.callback) {
    if (!callback_) throw std::invalid_argument("callback node '" + s.name + "' has no callable");
  }
  void run(const Step& st) override { callback_(st.at(x_), st.at(y_), st.rows, st.position); }

 private:
  int x_, y_;
  Callback callback_;
};

}  // namespace

std::unique_ptr<Node> make_node(const NodeSpec& s, Executor& e) {
  const Rows rows = s.inputs.empty() ? Rows::kTokens : e.rows_kind(s.inputs[0]);
  if (s.op == "embed" && s.table) return make_embed_file(s, e);
  if (s.op == "embed") return std::make_unique<Embed>(s);
  if (s.op == "rope_table") return std::make_unique<RopeTable>(s);
  if (s.op == "rms_norm") return std::make_unique<RmsNorm>(s, rows);
  if (s.op == "linear") return std::make_unique<Linear>(s, rows, e);
  if (s.op == "silu_mul") return std::make_unique<SiluMul>(s);
  if (s.op == "sigmoid_mul") return std::make_unique<SigmoidMul>(s);
  if (s.op == "last_rows") return std::make_unique<LastRows>(s);
  if (s.op == "divide") return std::make_unique<Scale>(s, rows);
  if (s.op == "gqa") return make_gqa(s, e);
  if (s.op == "mla") return make_mla(s, e);
  if (s.op == "router") return std::make_unique<Router>(s);
  if (s.op == "moe_submit") return make_moe_submit(s, e);
  if (s.op == "moe_collect") return make_moe_collect(s, e);
  if (s.op == "callback") return std::make_unique<CallbackNode>(s);
  throw std::invalid_argument("unknown operator '" + s.op + "' in node '" + s.name + "'");
}

}  // namespace ktc::graph
