// The callback protocol of the CUDA lane with a plain thread as the stream, under sanitizers.
//
// Built and run by `make asan` and `make tsan`. Several models of two to four MoE layers replay steps on
// streams of their own over one pool (some on two, the second taking over where the first stops, as layers on
// two devices do); their split into immediate, deferred and dropped experts changes
// between steps, some steps fail. Every step's result is compared with the same sum computed directly.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cuda/lane.h"
#include "huge_buffer.h"
#include "kernel_lib.h"
#include "moe.h"
#include "pool.h"
#include "thread_stream.h"

namespace {

constexpr int64_t kExperts = 8, kTopK = 4, kHidden = 64, kIntermediate = 64;
constexpr float kFailOnRequest = -12345.0f;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "lane stress: %s\n", what);
  std::exit(1);
}

int memcpy_async(void* dst, const void* src, size_t bytes, int, void* stream) {
  static_cast<ThreadStream*>(stream)->push([=] { std::memcpy(dst, src, bytes); });
  return 0;
}
int launch_host_func(void* stream, void (*function)(void*), void* data) {
  static_cast<ThreadStream*>(stream)->push([=] { function(data); });
  return 0;
}
int stream_synchronize(void* stream) {
  static_cast<ThreadStream*>(stream)->synchronize();
  return 0;
}
const char* error_string(int) { return "error"; }

ktc::cuda::Cudart threads_as_streams() {
  ktc::cuda::Cudart c;
  c.memcpy_async = &memcpy_async;
  c.launch_host_func = &launch_host_func;
  c.stream_synchronize = &stream_synchronize;
  c.get_error_string = &error_string;
  return c;
}

// fp32 tiles: any floats are a matrix.
class Weights {
 public:
  explicit Weights(uint32_t seed) : memory_(kExperts * 3 * kHidden * kIntermediate * 4) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 0.1f);
    auto* values = reinterpret_cast<float*>(memory_.data());
    for (int64_t i = 0; i < kExperts * 3 * kHidden * kIntermediate; ++i) values[i] = normal(random);
  }
  std::shared_ptr<ktc::Moe> build(const std::shared_ptr<ktc::KernelLib>& lib,
                                  const std::shared_ptr<ktc::Pool>& pool, float alpha) const {
    ktc::MoeOptions o;
    o.experts = kExperts;
    o.top_k = kTopK;
    o.hidden = kHidden;
    o.intermediate = kIntermediate;
    o.alpha = alpha;
    o.scheme = ktc::Scheme::from_names("fp32", "none", 0);
    ktc::MoeNode node;
    node.end = kIntermediate;
    for (int64_t e = 0; e < kExperts; ++e) {
      const uint8_t* const at = memory_.data() + e * 3 * kHidden * kIntermediate * 4;
      node.gate_up.push_back({at, nullptr, nullptr, nullptr});
      node.down.push_back({at + 2 * kHidden * kIntermediate * 4, nullptr, nullptr, nullptr});
    }
    o.nodes.push_back(std::move(node));
    return std::make_shared<ktc::Moe>(lib, pool, std::move(o));
  }

 private:
  ktc::Mapping memory_;
};

struct Model {
  std::vector<Weights> weights;
  std::vector<std::shared_ptr<ktc::Moe>> all;
  std::unique_ptr<ktc::cuda::Lane> lane;
  std::vector<std::vector<uint8_t>> device_send;  // one a layer, so that every layer has its own input
  std::vector<uint8_t> host_send;
  std::vector<float> host_receive;
  std::vector<std::vector<float>> device_out;
  std::vector<int64_t> calls;

  Model(const std::shared_ptr<ktc::KernelLib>& lib, const std::shared_ptr<ktc::Pool>& pool, int layers,
        int64_t rows, float alpha_of_last, bool help, bool partial = false)
      : host_receive(rows * kHidden) {
    const ktc::cuda::SendLayout layout(kHidden, kTopK, rows);
    host_send.resize(layout.bytes);
    for (int l = 0; l < layers; ++l) {
      weights.emplace_back(l);
      all.push_back(weights.back().build(lib, pool, l + 1 == layers ? alpha_of_last : 0.0f));
      device_send.emplace_back(layout.bytes);
      device_out.emplace_back(rows * kHidden);
    }
    lane = std::make_unique<ktc::cuda::Lane>(std::make_unique<ktc::cuda::Exchange>(all, help),
                                             threads_as_streams());
    for (int l = 0; l < layers; ++l)
      calls.push_back(lane->bind(l, rows, true, host_send.data(), host_receive.data(), partial));
  }
};

// `partial`: the device computes some of the experts.
void fill(std::vector<uint8_t>& send, int64_t rows, std::mt19937& random, bool partial = false) {
  const ktc::cuda::SendLayout layout(kHidden, kTopK, rows);
  auto* const x = reinterpret_cast<float*>(send.data());
  auto* const w = reinterpret_cast<float*>(send.data() + layout.weights);
  auto* const ids = reinterpret_cast<int64_t*>(send.data() + layout.ids);
  for (int64_t i = 0; i < rows * kHidden; ++i) x[i] = static_cast<float>(random() % 1000) / 500.0f - 1.0f;
  for (int64_t t = 0; t < rows; ++t) {
    const int64_t first = random() % kExperts;
    for (int64_t s = 0; s < kTopK; ++s) {
      ids[t * kTopK + s] = partial && random() % 3 == 0 ? ktc::cuda::kElsewhere
                                                        : (first + s * 3) % static_cast<int64_t>(kExperts);
      w[t * kTopK + s] = static_cast<float>(1 + random() % 1000) / 1000.0f + static_cast<float>(s) * 1e-4f;
    }
  }
}

// What the rows' slots [begin, end), by descending weight, sum to.
std::vector<float> direct(ktc::Moe& moe, const std::vector<uint8_t>& send, int64_t rows, int64_t begin,
                          int64_t end) {
  const ktc::cuda::SendLayout layout(kHidden, kTopK, rows);
  const auto* const x = reinterpret_cast<const float*>(send.data());
  const auto* const w = reinterpret_cast<const float*>(send.data() + layout.weights);
  const auto* const ids = reinterpret_cast<const int64_t*>(send.data() + layout.ids);
  std::vector<float> kept(w, w + rows * kTopK);
  std::vector<int64_t> here(ids, ids + rows * kTopK);
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t s = 0; s < kTopK; ++s) {
      int64_t rank = 0;
      for (int64_t o = 0; o < kTopK; ++o) rank += w[t * kTopK + o] > w[t * kTopK + s];
      if (rank < begin || rank >= end || here[t * kTopK + s] < 0) kept[t * kTopK + s] = 0.0f;
      if (here[t * kTopK + s] < 0) here[t * kTopK + s] = 0;
    }
  std::vector<float> out(rows * kHidden);
  moe.forward(x, kHidden, rows, here.data(), kept.data(), out.data(), kHidden);
  return out;
}

bool close(const std::vector<float>& a, const std::vector<float>& b) {
  for (size_t i = 0; i < a.size(); ++i)
    if (!(std::abs(a[i] - b[i]) <= 1e-4f)) return false;
  return true;
}

// As a CUDA event: what a stream does after `block` happens after what another did before `record`.
class Event {
 public:
  void record(ThreadStream& stream) {
    ++recorded_;
    stream.push([this] {
      const std::lock_guard<std::mutex> lock(mutex_);
      ++passed_;
      changed_.notify_all();
    });
  }
  void block(ThreadStream& stream) {
    stream.push([this, until = recorded_] {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return passed_ >= until; });
    });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int recorded_ = 0, passed_ = 0;
};

void replay(const std::shared_ptr<ktc::KernelLib>& lib, const std::shared_ptr<ktc::Pool>& pool, uint32_t seed,
            bool help, int steps) {
  const int layers = 2 + static_cast<int>(seed % 3);
  const int64_t rows = 1 + seed % 2;
  const bool partial = seed == 2;  // of one row
  Model m(lib, pool, layers, rows, 0.0f, help, partial);
  std::mt19937 random(seed);
  Event crossing;
  ThreadStream first, second;
  const int stage = seed == 1 ? layers : layers / 2;  // the layers from here on are on the second stream
  for (int step = 0; step < steps; ++step) {
    const int64_t later = random() % 3, dropped = later == 0 ? random() % 3 : 0;
    std::vector<int64_t> deferred(layers, later);
    deferred.back() = 0;
    m.lane->exchange().split(deferred, std::vector<int64_t>(layers, dropped));
    for (int l = 0; l < layers; ++l) {
      fill(m.device_send[l], rows, random, partial);
      ThreadStream& stream = l < stage ? first : second;
      if (l == stage) {
        crossing.record(first);
        crossing.block(second);
      }
      m.lane->submit(&stream, m.calls[l], m.device_send[l].data());
      m.lane->collect(&stream, m.calls[l], m.device_out[l].data());
    }
    m.lane->synchronize(&first);
    m.lane->synchronize(&second);
    m.lane->exchange().check();
    for (int l = 0; l < layers; ++l) {
      const bool last = l + 1 == layers;
      const int64_t end = kTopK - dropped - (last ? 0 : later);
      std::vector<float> want = direct(*m.all[l], m.device_send[l], rows, 0, end);
      if (l > 0 && later > 0) {
        const std::vector<float> more =
            direct(*m.all[l - 1], m.device_send[l - 1], rows, kTopK - later, kTopK);
        for (size_t i = 0; i < want.size(); ++i) want[i] += more[i];
      }
      require(close(m.device_out[l], want), "a layer's sum is wrong");
    }
  }
}

// A kernel fails in the last layer, an id is out of range in the first: the step ends, the error says where,
// the next step works.
void failing(const std::shared_ptr<ktc::KernelLib>& lib, const std::shared_ptr<ktc::Pool>& pool, int steps) {
  Model bad(lib, pool, 3, 1, kFailOnRequest, false);
  std::mt19937 random(1);
  ThreadStream stream;
  for (int step = 0; step < steps; ++step) {
    for (int l = 0; l < 3; ++l) fill(bad.device_send[l], 1, random);
    const bool wrong_id = step % 2 == 1;
    if (wrong_id) {
      const int64_t id = 99;
      std::memcpy(bad.device_send[0].data() + ktc::cuda::SendLayout(kHidden, kTopK, 1).ids, &id, 8);
    }
    for (int l = 0; l < 3; ++l) {
      bad.lane->submit(&stream, bad.calls[l], bad.device_send[l].data());
      bad.lane->collect(&stream, bad.calls[l], bad.device_out[l].data());
    }
    bad.lane->synchronize(&stream);
    std::string said;
    try {
      bad.lane->exchange().check();
    } catch (const std::runtime_error& e) {
      said = e.what();
    }
    require(said.find(wrong_id ? "MoE layer 0: " : "MoE layer 2: ") == 0,
            "the error does not say which layer");
    require(bad.device_out[2] == std::vector<float>(kHidden), "a failed layer must give zeros");
    bad.lane->exchange().check();  // said once
  }
  // Abandoned half way: check takes the ticket back.
  bad.lane->submit(&stream, bad.calls[0], bad.device_send[0].data());
  bad.lane->synchronize(&stream);
  try {
    bad.lane->exchange().check();
  } catch (const std::runtime_error&) {
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string library = argc > 1 ? argv[1] : std::string(argv[0]) + ".lib.so";
  const int steps = argc > 2 ? std::atoi(argv[2]) : 30;
  const auto lib = std::make_shared<ktc::KernelLib>(library);
  for (const std::vector<int>& cpus : {std::vector<int>{0}, {0, 1}, {0, 1, 0, 1}}) {
    const auto pool = std::make_shared<ktc::Pool>(std::vector<std::vector<int>>{cpus}, false);
    std::vector<std::thread> models;
    for (uint32_t seed = 0; seed < 3; ++seed)
      models.emplace_back([&, seed] { replay(lib, pool, seed, seed == 1, steps); });
    models.emplace_back([&] { failing(lib, pool, steps); });
    for (std::thread& t : models) t.join();
  }
  std::puts("lane stress: ok");
  return 0;
}
