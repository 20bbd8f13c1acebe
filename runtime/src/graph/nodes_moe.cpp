// moe_submit and moe_collect, with Expert Deferral (paper, section 4) and skipping.
//
// O_l = I_l + S(I_l) + R_imm_l(I_l) + R_def_{l-1}(I_{l-1}): a layer's lowest-weighted experts are added by
// the next MoE layer's collect. Decode only; the last MoE layer defers none. Weights decide, sorted here.
#include <algorithm>
#include <stdexcept>

#include "graph/executor.h"

namespace ktc::graph {

namespace {

// Stable, descending; a NaN counts as the largest so that its row is poisoned in its own layer.
bool before(float a, float b) { return a > b || (a != a && b == b); }

void sort_slots(const int64_t* ids, const float* weights, int64_t k, int64_t* out_ids, float* out_weights) {
  for (int64_t s = 0; s < k; ++s) {
    int64_t at = s;
    for (; at > 0 && before(weights[s], out_weights[at - 1]); --at) {
      out_weights[at] = out_weights[at - 1];
      out_ids[at] = out_ids[at - 1];
    }
    out_weights[at] = weights[s];
    out_ids[at] = ids[s];
  }
}

class Submit final : public Node {
 public:
  Submit(const NodeSpec& s, Executor& e)
      : x_(s.inputs.at(0)),
        weights_(s.inputs.at(1)),
        ids_(s.inputs.at(2)),
        experts_(s.experts),
        mail_(e.mailbox()),
        last_(s.param("last", 0) != 0),
        planned_(static_cast<int>(s.param("n_deferred", 0))) {
    if (!experts_) throw std::invalid_argument("moe_submit node '" + s.name + "' has no experts");
    configure(e.options());
    const auto slots = static_cast<size_t>(e.max_rows() * experts_->top_k);
    mail_.ids.resize(std::max(mail_.ids.size(), slots));
    mail_.weights.resize(std::max(mail_.weights.size(), slots));
    mail_.scratch.resize(std::max(mail_.scratch.size(), static_cast<size_t>(experts_->hidden)));
  }

  void configure(const Options& o) override {
    const int64_t k = experts_->top_k;
    const int deferred = last_ ? 0 : (o.n_deferred >= 0 ? o.n_deferred : planned_);
    if (deferred > 0 && (deferred > k - 2 || o.n_skipped > 0))
      throw std::invalid_argument("cannot defer " + std::to_string(deferred) + " of " + std::to_string(k) +
                                  " experts: at least 2 stay immediate, and skipping excludes deferring");
    if (o.n_skipped < 0 || o.n_skipped >= k)
      throw std::invalid_argument("cannot skip " + std::to_string(o.n_skipped) + " of " + std::to_string(k) +
                                  " experts");
    deferred_ = deferred;
    skipped_ = o.n_skipped;
  }

  void run(const Step& st) override {
    const float* const x = st.at(x_);
    const float* const weights = st.at(weights_);
    const int64_t* const ids = st.at<int64_t>(ids_);
    const int64_t k = experts_->top_k, later = st.decode ? deferred_ : 0, dropped = st.decode ? skipped_ : 0;
    if (later == 0 && dropped == 0) {
      if (st.trivial) return;
      mail_.immediate = {experts_.get(), experts_->submit(x, st.rows, ids, weights, k), st.rows};
      return;
    }
    // Rows of the first `now` slots packed one after another, then rows of the deferred ones.
    const int64_t now = k - later - dropped;
    int64_t* const all_ids = mail_.ids.data();
    float* const all_weights = mail_.weights.data();
    for (int64_t t = 0; t < st.rows; ++t) {
      int64_t row_ids[kMaxTopK];
      float row_weights[kMaxTopK];
      sort_slots(ids + t * k, weights + t * k, k, row_ids, row_weights);
      std::copy_n(row_ids, now, all_ids + t * now);
      std::copy_n(row_weights, now, all_weights + t * now);
      std::copy_n(row_ids + now, later, all_ids + st.rows * now + t * later);
      std::copy_n(row_weights + now, later, all_weights + st.rows * now + t * later);
    }
    if (st.trivial) return;
    mail_.immediate = {experts_.get(), experts_->submit(x, st.rows, all_ids, all_weights, now), st.rows};
    if (later > 0)
      mail_.posted = {
          experts_.get(),
          experts_->submit(x, st.rows, all_ids + st.rows * now, all_weights + st.rows * now, later), st.rows};
  }

  static constexpr int64_t kMaxTopK = 256;

 private:
  int x_, weights_, ids_;
  std::shared_ptr<Experts> experts_;
  Mailbox& mail_;
  const bool last_;
  const int planned_;
  int deferred_ = 0, skipped_ = 0;
};

class Collect final : public Node {
 public:
  Collect(const NodeSpec& s, Executor& e)
      : y_(s.outputs.at(0)), hidden_(static_cast<int64_t>(s.param("hidden"))), mail_(e.mailbox()) {}
  void run(const Step& st) override {
    if (st.trivial) return;
    float* const y = st.at(y_);
    const Mailbox::Ticket now = mail_.immediate;
    mail_.immediate = {};
    now.experts->collect(now.id, y, now.rows);
    if (const Mailbox::Ticket due = mail_.deferred) {
      mail_.deferred = {};
      if (mail_.scratch.size() < static_cast<size_t>(due.rows * hidden_))
        mail_.scratch.resize(static_cast<size_t>(due.rows * hidden_));  // first batched decode step only
      due.experts->collect(due.id, mail_.scratch.data(), due.rows);
      st.table->axpby(y, 1.0f, mail_.scratch.data(), 1.0f, due.rows * hidden_, y);
    }
    mail_.deferred = mail_.posted;
    mail_.posted = {};
  }

 private:
  int y_;
  int64_t hidden_;
  Mailbox& mail_;
};

}  // namespace

std::unique_ptr<Node> make_moe_submit(const NodeSpec& s, Executor& e) {
  if (s.experts && s.experts->top_k > Submit::kMaxTopK)
    throw std::invalid_argument(s.name + ": top_k above " + std::to_string(Submit::kMaxTopK));
  return std::make_unique<Submit>(s, e);
}
std::unique_ptr<Node> make_moe_collect(const NodeSpec& s, Executor& e) {
  return std::make_unique<Collect>(s, e);
}

}  // namespace ktc::graph
