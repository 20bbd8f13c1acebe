// Pool, Linear and Moe under sanitizers: many callers, failing tasks, every schedule, buffers, early exits.
//
// Built and run by `make asan` and `make tsan` with tests/runtime/reference_lib.cpp as the kernel library. It
// checks that results are equal for all pools and that errors arrive; what the results should be is the
// business of tests/runtime.
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "huge_buffer.h"
#include "kernel_lib.h"
#include "linear.h"
#include "moe.h"
#include "pool.h"

namespace {

std::atomic<int64_t> g_allocations{0};

void* counted(size_t bytes, size_t alignment) {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  void* const p = std::aligned_alloc(alignment, (bytes + alignment) / alignment * alignment);
  if (p == nullptr) throw std::bad_alloc();
  return p;
}

}  // namespace

// Not inlined: g++ would take free for the wrong counterpart of new.
#define COUNTED __attribute__((noinline))
COUNTED void* operator new(size_t bytes) { return counted(bytes, alignof(std::max_align_t)); }
COUNTED void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  g_allocations.fetch_add(1, std::memory_order_relaxed);
  return std::malloc(bytes);
}
COUNTED void* operator new(size_t bytes, std::align_val_t a) {
  return counted(bytes, static_cast<size_t>(a));
}
COUNTED void operator delete(void* p) noexcept { std::free(p); }
COUNTED void operator delete(void* p, size_t) noexcept { std::free(p); }
COUNTED void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
COUNTED void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace {

constexpr int64_t kExperts = 7, kTopK = 5, kHidden = 64, kIntermediate = 128;
constexpr float kFailOnRequest = -12345.0f;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "stress: %s\n", what);
  std::exit(1);
}

std::shared_ptr<ktc::Pool> make_pool(const std::vector<std::vector<int>>& nodes, bool caller_works = true) {
  return std::make_shared<ktc::Pool>(nodes, false, caller_works);
}

// fp32 tiles: the packed bytes are the weights themselves, so random floats are a matrix.
class Weights {
 public:
  Weights(int64_t n, int64_t k, uint32_t seed) : memory_(n * k * 4) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0.0f, 0.1f);
    auto* values = reinterpret_cast<float*>(memory_.data());
    for (int64_t i = 0; i < n * k; ++i) values[i] = normal(random);
  }
  ktc_weight get(int64_t offset = 0) const { return {memory_.data() + offset, nullptr, nullptr, nullptr}; }

 private:
  ktc::Mapping memory_;
};

struct Routed {
  std::vector<float> x, weights;
  std::vector<int64_t> ids;
  int64_t tokens;

  Routed(int64_t t, uint32_t seed) : x(t * kHidden), weights(t * kTopK), ids(t * kTopK), tokens(t) {
    std::mt19937 random(seed);
    for (float& v : x) v = static_cast<float>(random() % 1000) / 500.0f - 1.0f;
    for (float& v : weights) v = static_cast<float>(random() % 100) / 100.0f;
    for (int64_t& id : ids) id = random() % kExperts;
  }
};

class Layer {
 public:
  Layer() {
    for (int64_t e = 0; e < kExperts; ++e) {
      gate_up_.emplace_back(2 * kIntermediate, kHidden, 2 * e);
      down_.emplace_back(kHidden, kIntermediate, 2 * e + 1);
    }
  }

  std::shared_ptr<ktc::Moe> build(std::shared_ptr<ktc::KernelLib> lib, std::shared_ptr<ktc::Pool> pool,
                                  ktc::Schedule schedule, float alpha = 0.0f) const {
    ktc::MoeOptions o;
    o.experts = kExperts;
    o.top_k = kTopK;
    o.hidden = kHidden;
    o.intermediate = kIntermediate;
    o.alpha = alpha;
    o.schedule = schedule;
    o.scheme = ktc::Scheme::from_names("fp32", "none", 0);
    for (int n = 0; n < pool->nodes(); ++n) {
      ktc::MoeNode node;
      node.begin = kIntermediate / pool->nodes() * n;
      node.end = kIntermediate / pool->nodes() * (n + 1);
      for (int64_t e = 0; e < kExperts; ++e) {
        // A node's part of gate_up is contiguous. Any bytes do as its part of down, if they stay the same.
        node.gate_up.push_back(gate_up_[e].get(2 * node.begin * kHidden * 4));
        node.down.push_back(down_[e].get(node.begin * kHidden * 4));
      }
      o.nodes.push_back(std::move(node));
    }
    return std::make_shared<ktc::Moe>(std::move(lib), std::move(pool), std::move(o));
  }

 private:
  std::vector<Weights> gate_up_, down_;
};

std::vector<float> forward(ktc::Moe& moe, const Routed& r) {
  std::vector<float> out(r.tokens * kHidden, -1.0f);
  moe.forward(r.x.data(), kHidden, r.tokens, r.ids.data(), r.weights.data(), out.data(), kHidden);
  return out;
}

std::vector<float> collect(ktc::Moe& moe, int64_t ticket, int64_t tokens) {
  std::vector<float> out(tokens * kHidden, -1.0f);
  moe.collect(ticket, out.data(), kHidden);
  return out;
}

int64_t submit(ktc::Moe& moe, const Routed& r) {
  return moe.submit(r.x.data(), kHidden, r.tokens, r.ids.data(), r.weights.data());
}

// Callers share a pool and a layer, each with its own rows; some calls fail, some tickets are dropped.
void callers(const std::shared_ptr<ktc::KernelLib>& lib, const Layer& layer,
             const std::vector<std::vector<int>>& nodes, ktc::Schedule schedule, int rounds,
             bool caller_works = true) {
  const auto pool = make_pool(nodes, caller_works);
  const auto shared = layer.build(lib, pool, schedule);
  const auto fails = layer.build(lib, pool, schedule, kFailOnRequest);
  std::vector<std::thread> threads;
  for (uint32_t seed = 0; seed < 3; ++seed) {
    threads.emplace_back([&, seed] {
      const Routed few(1 + seed, seed), many(5 + 2 * seed, 10 + seed);
      const std::vector<float> want_few = forward(*shared, few), want_many = forward(*shared, many);
      for (int i = 0; i < rounds; ++i) {
        const int64_t a = submit(*shared, few), b = submit(*shared, many);
        require(forward(*shared, many) == want_many, "forward differs");
        require(collect(*shared, b, many.tokens) == want_many, "second ticket differs");
        require(collect(*shared, a, few.tokens) == want_few, "first ticket differs");
        const int64_t bad = submit(*fails, few);
        bool thrown = false;
        try {
          collect(*fails, bad, few.tokens);
        } catch (const std::runtime_error&) {
          thrown = true;
        }
        require(thrown, "a failing kernel went unnoticed");
        const auto own = layer.build(lib, pool, schedule);
        submit(*own, few);  // dropped
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

void same_bits(const std::shared_ptr<ktc::KernelLib>& lib, const Layer& layer) {
  for (size_t count = 1; count <= 2; ++count) {
    for (int64_t tokens : {18, 1}) {
      std::vector<float> first;
      const Routed r(tokens, 5);
      for (size_t threads : {1, 2, 3, 5}) {
        for (ktc::Schedule schedule : {ktc::Schedule::kDynamic, ktc::Schedule::kStatic}) {
          const auto pool = make_pool(std::vector<std::vector<int>>(count, std::vector<int>(threads, 0)));
          const std::vector<float> out = forward(*layer.build(lib, pool, schedule), r);
          if (first.empty()) first = out;
          require(out == first, "bits depend on threads or schedule");
        }
      }
    }
  }
}

// A thread that stands for a device hands over two jobs a layer and only waits; the pool's record of them is
// whole.
void device_lane(const std::shared_ptr<ktc::KernelLib>& lib, const Layer& layer, int rounds, int64_t tokens) {
  const auto pool = make_pool({{0, 1}}, false);
  const auto moe = layer.build(lib, pool, ktc::Schedule::kDynamic);
  const Routed a(tokens, 1), b(tokens, 2);
  const std::vector<float> want_a = forward(*moe, a), want_b = forward(*moe, b);
  pool->observe(true);
  for (int i = 0; i < rounds; ++i) {
    const int64_t first = submit(*moe, a), second = submit(*moe, b);
    require(collect(*moe, first, a.tokens) == want_a, "immediate experts differ");
    require(collect(*moe, second, b.tokens) == want_b, "deferred experts differ");
  }
  int64_t last = 0;
  for (const ktc::Pool::JobTimes& job : pool->job_times()) {
    require(job.submitted <= job.begun && job.begun <= job.done && job.busy > 0,
            "a job's record is not whole");
    require(last <= job.done, "jobs did not end in order of submission");
    last = job.done;
  }
  require(pool->observed() == static_cast<size_t>(2 * rounds), "jobs are missing from the record");
  pool->observe(false);
}

// One job of `tasks` tasks that only count.
void hand_over(ktc::Pool& pool, int64_t tasks) {
  std::atomic<int64_t> done{0};
  ktc::Job* const job = pool.acquire();
  job->reset(nullptr, ktc::Schedule::kDynamic, 0);
  for (int phase = 0; phase < 2; ++phase) {
    job->add_phase(
        [](void* context, const ktc::Task&) {
          static_cast<std::atomic<int64_t>*>(context)->fetch_add(1, std::memory_order_relaxed);
        },
        &done);
    for (int node = 0; node < pool.nodes(); ++node) job->set_tasks(phase, node, tasks);
  }
  pool.submit(job);
  pool.wait(job);
  pool.release(job);
  require(done.load() == 2 * tasks * pool.nodes(), "tasks were lost or run twice");
}

// Many threads push at once, so that the queue runs empty and fills again all the time; and none of it
// allocates once there are jobs enough.
void queue(int rounds, bool caller_works) {
  const auto pool = make_pool({{0, 1}, {0}}, caller_works);
  std::vector<std::thread> threads;
  for (int64_t t = 1; t <= 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < rounds; ++i) hand_over(*pool, t);
    });
  for (std::thread& t : threads) t.join();
  require(pool->idle(), "the queue is not empty");
  const int64_t before = g_allocations.load();
  for (int i = 0; i < rounds; ++i) hand_over(*pool, 2);
  require(g_allocations.load() == before, "handing over a job allocates");
}

// A job whose only task waits until the job behind it has run: idle threads must begin that one. It is done
// second all the same. With a second phase of the first to come (`kept`) they must not.
void ahead(bool kept) {
  struct Two {
    std::atomic<int64_t> first{0}, behind{0};
    bool kept = false;
  } two;
  two.kept = kept;
  const auto pool = make_pool({{0, 1, 0}}, false);
  ktc::Job* const first = pool->acquire();
  ktc::Job* const behind = pool->acquire();
  constexpr int64_t kBehind = 20;
  const auto waits = [](void* context, const ktc::Task&) {
    Two& two = *static_cast<Two*>(context);
    const int64_t until = ktc::now_ns() + (two.kept ? 20000000 : 20000000000);
    while (two.behind.load() < kBehind && ktc::now_ns() < until) std::this_thread::yield();
    require((two.behind.load() == 0) == two.kept, two.kept ? "a job was begun early" : "a job was not begun");
    two.first.fetch_add(1);
  };
  const auto counts = [](void* context, const ktc::Task&) {
    static_cast<Two*>(context)->behind.fetch_add(1);
  };
  first->reset(nullptr, ktc::Schedule::kDynamic, 0);
  first->set_tasks(first->add_phase(waits, &two), 0, 1);
  if (kept) first->set_tasks(first->add_phase([](void*, const ktc::Task&) {}, &two), 0, 3);
  behind->reset(nullptr, ktc::Schedule::kDynamic, 0);
  behind->set_tasks(behind->add_phase(counts, &two), 0, kBehind);
  pool->submit(first);
  pool->submit(behind);
  pool->wait(behind);
  require(two.first.load() == 1 && two.behind.load() == kBehind, "jobs were done out of order");
  pool->wait(first);
  pool->release(first);
  pool->release(behind);
}

// Submit and collect allocate nothing once there are calls enough; two tickets a layer, as with deferred
// experts.
void no_allocation(const std::shared_ptr<ktc::KernelLib>& lib, const Layer& layer, int rounds) {
  const auto moe = layer.build(lib, make_pool({{0, 1}}), ktc::Schedule::kDynamic);
  const Routed a(1, 1), b(2, 2);
  std::vector<float> out(2 * kHidden);
  // Enough: two in use, and two more for each thread that may still point to some.
  std::vector<int64_t> tickets;
  for (int i = 0; i < 2 + 2 * 2; ++i) tickets.push_back(submit(*moe, b));
  for (const int64_t ticket : tickets) moe->collect(ticket, out.data(), kHidden);
  const int64_t before = g_allocations.load();
  for (int i = 0; i < rounds; ++i) {
    const int64_t first = submit(*moe, a), second = submit(*moe, b);
    moe->collect(first, out.data(), kHidden);
    moe->collect(second, out.data(), kHidden);
  }
  require(g_allocations.load() == before, "a submitted call allocates");
}

void linears(const std::shared_ptr<ktc::KernelLib>& lib, int rounds) {
  const auto pool = make_pool({{0, 1, 0}});
  const Weights weights(96, 128, 3);
  ktc::Linear linear(lib, pool, 90, 128, ktc::Scheme::from_names("fp32", "none", 0), weights.get(), "");
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t) {
    threads.emplace_back([&, t] {
      const int64_t m = 1 + 20 * t;
      const std::vector<float> x(m * 128, 0.5f);
      std::vector<float> want(m * 90), got(m * 90);
      linear.forward(x.data(), 128, m, want.data(), 90);
      for (int i = 0; i < rounds; ++i) {
        linear.forward(x.data(), 128, m, got.data(), 90);
        require(got == want, "linear differs");
        std::vector<float> ahead(m * 90), behind(m * 90);  // two at once, the later one waited for first
        ktc::Job* const first = linear.submit(x.data(), 128, m, ahead.data(), 90);
        ktc::Job* const second = linear.submit(x.data(), 128, m, behind.data(), 90);
        linear.wait(second);
        linear.wait(first);
        require(ahead == want && behind == want, "linears together differ");
      }
    });
  }
  for (std::thread& t : threads) t.join();
}

void buffers(const char* file) {
  const auto pool = make_pool({{0, 1}, {0}});
  for (int node = -1; node < 2; ++node) {
    ktc::HugeBuffer buffer(20 << 20, node);
    buffer.read_file(file, 0, 4096, 100, *pool);
    require(std::memcmp(buffer.data() + 100, "\177ELF", 4) == 0, "read_file read something else");
    bool thrown = false;
    try {
      buffer.read_file(file, 0, 20 << 20, 0, *pool);
    } catch (const std::runtime_error&) {
      thrown = true;
    }
    require(thrown, "a short file went unnoticed");
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string library = argc > 1 ? argv[1] : std::string(argv[0]) + ".lib.so";
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 10;
  const auto lib = std::make_shared<ktc::KernelLib>(library);
  const Layer layer;
  same_bits(lib, layer);
  for (ktc::Schedule schedule : {ktc::Schedule::kDynamic, ktc::Schedule::kStatic}) {
    callers(lib, layer, {{0}}, schedule, rounds);
    callers(lib, layer, {{0, 1}}, schedule, rounds);
    callers(lib, layer, {{0, 1, 0}, {1, 0}}, schedule, rounds);
    callers(lib, layer, {{0}}, schedule, rounds, false);
    callers(lib, layer, {{0, 1}, {0}}, schedule, rounds, false);
  }
  for (const bool kept : {false, true})
    for (int i = 0; i < rounds; ++i) ahead(kept);
  for (int64_t tokens : {1, 4}) device_lane(lib, layer, 10 * rounds, tokens);
  no_allocation(lib, layer, 50 * rounds);
  for (const bool caller_works : {true, false}) queue(100 * rounds, caller_works);
  linears(lib, 5 * rounds);
  buffers(library.c_str());
  for (int i = 0; i < 100; ++i) make_pool({{0, 1, 0, 1}});
  std::puts("stress: ok");
  return 0;
}
