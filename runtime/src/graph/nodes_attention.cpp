// The attention nodes of the decode graph: grouped queries, and multi-head latent attention.
#include <stdexcept>

#include "graph/node_params.h"

namespace ktc::graph {

namespace {

ops::Prefill prefill(const NodeSpec& s) {
  return s.param("bf16", 0) != 0 ? ops::Prefill::kBF16 : ops::Prefill::kF32;
}

class Gqa final : public Node {
 public:
  Gqa(const NodeSpec& s, Executor& e)
      : q_(input(s, 0)),
        k_(input(s, 1)),
        v_(input(s, 2)),
        cos_(input(s, 3)),
        sin_(input(s, 4)),
        out_(output(s, 0)),
        scratch_(output(s, 1)),
        k_cache_(e.state(s.states.at(0))),
        v_cache_(e.state(s.states.at(1))),
        context_(e.options().context) {
    shape_ = {integer(s, "heads"),
              integer(s, "kv_heads"),
              integer(s, "head_dim"),
              integer(s, "rotary_half"),
              integer(s, "window"),
              static_cast<ops::Rope>(integer(s, "rope")),
              static_cast<float>(s.param("scale")),
              static_cast<float>(s.param("norm_eps", 0.0)),
              static_cast<float>(s.param("clip", 0.0)),
              prefill(s)};
    const auto optional = [&](const char* key) {
      const WeightRef* w = s.weight(key);
      return w ? w->f32(key) : nullptr;
    };
    q_norm_ = optional("q_norm");
    k_norm_ = optional("k_norm");
    sinks_ = optional("sinks");
    if (shape_.rotary_half > ops::kMaxRopeHalf)
      throw std::invalid_argument(s.name + ": rotary dimension too large");
  }
  void run(const Step& st) override {
    if (st.trivial) return;
    ops::gqa(*st.table, *st.parallel, shape_,
             {st.at(q_), st.at(k_), st.at(v_), st.at(cos_), st.at(sin_), q_norm_, k_norm_, sinks_, k_cache_,
              v_cache_, context_, st.position, st.rows, st.at(out_), st.at(scratch_)});
  }

 private:
  int q_, k_, v_, cos_, sin_, out_, scratch_;
  float* k_cache_;
  float* v_cache_;
  int64_t context_;
  ops::GqaShape shape_;
  const float *q_norm_, *k_norm_, *sinks_;
};

class Mla final : public Node {
 public:
  Mla(const NodeSpec& s, Executor& e)
      : q_(input(s, 0)),
        kv_(input(s, 1)),
        cos_(input(s, 2)),
        sin_(input(s, 3)),
        out_(output(s, 0)),
        scratch_(output(s, 1)),
        cache_(e.state(s.states.at(0))),
        kv_norm_(s.need("kv_norm").f32("kv_norm")),
        kv_b_(s.need("kv_b").matrix()) {
    shape_ = {integer(s, "heads"),
              integer(s, "nope"),
              integer(s, "rope_dim"),
              integer(s, "v_dim"),
              integer(s, "rank"),
              static_cast<ops::Rope>(integer(s, "rope")),
              static_cast<float>(s.param("scale")),
              static_cast<float>(s.param("norm_eps")),
              prefill(s)};
    if (shape_.rope_dim / 2 > ops::kMaxRopeHalf)
      throw std::invalid_argument(s.name + ": rotary dimension too large");
  }
  void run(const Step& st) override {
    if (st.trivial) return;
    ops::mla(*st.table, *st.parallel, shape_,
             {st.at(q_), st.at(kv_), st.at(cos_), st.at(sin_), kv_norm_, kv_b_, cache_, st.position, st.rows,
              st.at(out_), st.at(scratch_)});
  }

 private:
  int q_, kv_, cos_, sin_, out_, scratch_;
  float* cache_;
  const float* kv_norm_;
  ops::Matrix kv_b_;
  ops::MlaShape shape_;
};

}  // namespace

std::unique_ptr<Node> make_gqa(const NodeSpec& s, Executor& e) { return std::make_unique<Gqa>(s, e); }
std::unique_ptr<Node> make_mla(const NodeSpec& s, Executor& e) { return std::make_unique<Mla>(s, e); }

}  // namespace ktc::graph
