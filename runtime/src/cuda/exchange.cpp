#include "cuda/exchange.h"

#include <algorithm>
#include <stdexcept>

#include "event.h"

namespace ktc::cuda {
namespace {

std::invalid_argument bad(const std::string& message) {
  return std::invalid_argument("cuda lane: " + message);
}

// A NaN counts as the largest, so that its row is poisoned in its own layer.
bool before(float a, float b) { return a > b || (a != a && b == b); }

// Stable insertion sort of one row by descending weight (failure R8: top-k comes back in any order).
void sort_row(int64_t* ids, float* weights, int64_t k) {
  for (int64_t s = 1; s < k; ++s) {
    const int64_t id = ids[s];
    const float weight = weights[s];
    int64_t at = s;
    for (; at > 0 && before(weight, weights[at - 1]); --at) {
      ids[at] = ids[at - 1];
      weights[at] = weights[at - 1];
    }
    ids[at] = id;
    weights[at] = weight;
  }
}

}  // namespace

SendLayout::SendLayout(int64_t hidden, int64_t top_k, int64_t rows) {
  weights = rows * hidden * 4;
  ids = (weights + rows * top_k * 4 + 7) / 8 * 8;
  bytes = ids + rows * top_k * 8;
}

Exchange::Exchange(std::vector<std::shared_ptr<Moe>> layers, bool help) : help_(help) {
  if (layers.empty()) throw bad("a model needs at least one MoE layer");
  for (std::shared_ptr<Moe>& moe : layers) {
    if (!moe) throw bad("layer " + std::to_string(layers_.size()) + " has no experts");
    if (layers_.empty()) hidden_ = moe->options().hidden;
    if (moe->options().hidden != hidden_) throw bad("the layers have different hidden sizes");
    layers_.emplace_back();
    layers_.back().moe = std::move(moe);
  }
}

Exchange::~Exchange() {
  for (Layer& layer : layers_) {
    drain(layer.immediate);
    drain(layer.posted);
  }
}

void Exchange::split(const std::vector<int64_t>& deferred, const std::vector<int64_t>& skipped) {
  if (deferred.size() != layers_.size() || skipped.size() != layers_.size())
    throw bad("a split needs numbers for each of the " + std::to_string(layers_.size()) + " layers");
  for (size_t l = 0; l < layers_.size(); ++l) {
    const int64_t k = top_k(static_cast<int>(l));
    if (deferred[l] < 0 || skipped[l] < 0 || deferred[l] + skipped[l] >= k)
      throw bad("layer " + std::to_string(l) + ": " + std::to_string(deferred[l]) + " deferred and " +
                std::to_string(skipped[l]) + " skipped of " + std::to_string(k) + " experts");
  }
  if (deferred.back() != 0) throw bad("the last layer cannot defer");
  for (size_t l = 0; l < layers_.size(); ++l) {
    layers_[l].deferred = deferred[l];
    layers_[l].skipped = skipped[l];
  }
}

void Exchange::submit(const Call& call) noexcept {
  if (failed_.load(std::memory_order_acquire)) return;
  try {
    Layer& layer = layers_[call.layer];
    if (layer.open) throw std::logic_error("submitted twice without a collect");
    layer.open = true;
    if (call.partial) {
      submit_one(layer, call);
    } else if (!call.decode || layer.deferred + layer.skipped == 0) {
      layer.immediate = {layer.moe.get(), layer.moe->submit(call.x, hidden_, call.rows, call.ids, call.w)};
    } else {
      sort_and_submit(layer, call);
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    ++stats_.submits;
  } catch (...) {
    fail(call.layer);
  }
}

void Exchange::sort_and_submit(Layer& layer, const Call& call) {
  const int64_t k = layer.moe->options().top_k, later = layer.deferred, now = k - later - layer.skipped;
  const auto slots = static_cast<size_t>(call.rows * k + k);  // and one row to sort in
  if (ids_.size() < slots) {                                  // the first step only
    ids_.resize(slots);
    weights_.resize(slots);
  }
  int64_t* const row_ids = ids_.data() + call.rows * k;
  float* const row_weights = weights_.data() + call.rows * k;
  for (int64_t t = 0; t < call.rows; ++t) {
    std::copy_n(call.ids + t * k, k, row_ids);
    std::copy_n(call.w + t * k, k, row_weights);
    sort_row(row_ids, row_weights, k);
    std::copy_n(row_ids, now, ids_.data() + t * now);
    std::copy_n(row_weights, now, weights_.data() + t * now);
    std::copy_n(row_ids + now, later, ids_.data() + call.rows * now + t * later);
    std::copy_n(row_weights + now, later, weights_.data() + call.rows * now + t * later);
  }
  layer.immediate = {layer.moe.get(),
                     layer.moe->submit(call.x, hidden_, call.rows, ids_.data(), weights_.data(), now)};
  if (later > 0)
    layer.posted = {layer.moe.get(),
                    layer.moe->submit(call.x, hidden_, call.rows, ids_.data() + call.rows * now,
                                      weights_.data() + call.rows * now, later)};
}

// One row, some of whose experts the device computes: the split is decided by all of them, and what is left
// of either part is submitted.
void Exchange::submit_one(Layer& layer, const Call& call) {
  const int64_t k = layer.moe->options().top_k, kept = k - (call.decode ? layer.skipped : 0);
  const int64_t now = kept - (call.decode ? layer.deferred : 0);
  const auto slots = static_cast<size_t>(k);
  if (ids_.size() < slots) {  // the first step only
    ids_.resize(slots);
    weights_.resize(slots);
  }
  std::copy_n(call.ids, k, ids_.data());
  std::copy_n(call.w, k, weights_.data());
  sort_row(ids_.data(), weights_.data(), k);
  const auto submit = [&](int64_t begin, int64_t end) -> Ticket {
    int64_t count = 0;
    for (int64_t s = begin; s < end; ++s) {
      if (ids_[s] == kElsewhere) continue;
      ids_[begin + count] = ids_[s];
      weights_[begin + count] = weights_[s];
      ++count;
    }
    if (count == 0) return {};
    return {layer.moe.get(),
            layer.moe->submit(call.x, hidden_, 1, ids_.data() + begin, weights_.data() + begin, count)};
  };
  layer.immediate = submit(0, now);
  layer.posted = submit(now, kept);
}

void Exchange::collect(const Call& call) noexcept {
  const int64_t floats = call.rows * hidden_;
  if (failed_.load(std::memory_order_acquire)) {
    std::fill_n(call.out, floats, 0.0f);
    return;
  }
  const int64_t began = now_ns();
  try {
    Layer& layer = layers_[call.layer];
    const Ticket mine = layer.immediate;
    layer.immediate = {};
    if (!layer.open) throw std::logic_error("collected without a submit");
    layer.open = false;
    if (mine) {
      mine.moe->collect(mine.id, call.out, hidden_, help_);
    } else {
      std::fill_n(call.out, floats, 0.0f);
    }
    Ticket due;
    if (call.layer > 0) std::swap(due, layers_[call.layer - 1].posted);
    if (due) {
      if (due_.size() < static_cast<size_t>(floats))
        due_.resize(static_cast<size_t>(floats));  // first step only
      due.moe->collect(due.id, due_.data(), hidden_, help_);
      for (int64_t i = 0; i < floats; ++i) call.out[i] += due_[static_cast<size_t>(i)];
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    ++stats_.collects;
    stats_.wait_ns += now_ns() - began;
  } catch (...) {
    fail(call.layer);
    std::fill_n(call.out, floats, 0.0f);
  }
}

void Exchange::fail(int layer) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!error_) {
    error_ = std::current_exception();
    where_ = layer;
    ++stats_.errors;
  }
  failed_.store(true, std::memory_order_release);
}

void Exchange::drain(Ticket& ticket) noexcept {
  if (!ticket) return;
  const Ticket taken = ticket;
  ticket = {};
  try {
    taken.moe->discard(taken.id);
  } catch (...) {  // the first error is already on its way to the caller
  }
}

void Exchange::check() {
  for (Layer& layer : layers_) {
    drain(layer.immediate);
    drain(layer.posted);
    layer.open = false;
  }
  std::exception_ptr error;
  int where = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::swap(error, error_);
    where = where_;
  }
  failed_.store(false, std::memory_order_release);
  if (!error) return;
  const std::string layer = "MoE layer " + std::to_string(where) + ": ";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    throw std::runtime_error(layer + e.what());
  } catch (...) {
    throw std::runtime_error(layer + "unknown error");
  }
}

Exchange::Stats Exchange::stats() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return stats_;
}

}  // namespace ktc::cuda
