#include "machine_limits.h"

#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <new>
#include <stdexcept>
#include <thread>

#include "cpu.h"
#include "event.h"

namespace ktc {
namespace {

using ComputeKernel = double (*)(int64_t steps);

constexpr int64_t kReadPerThread = 64 << 20;  // about 4 ms

bool has(const std::vector<std::string>& features, const char* name) {
  return std::find(features.begin(), features.end(), name) != features.end();
}

// Null if this process may not run the kind.
ComputeKernel compute_kernel(const std::string& kind) {
  const std::vector<std::string> features = cpu_features();
  const bool tiles = has(features, "amx_tile") && amx_permission().first;
  if (kind == "amx_int8" && tiles && has(features, "amx_int8")) return &limits::amx_int8;
  if (kind == "amx_bf16" && tiles && has(features, "amx_bf16")) return &limits::amx_bf16;
  if (kind == "avx512_vnni" && has(features, "avx512_vnni")) return &limits::avx512_vnni;
  if (kind == "avx_vnni" && has(features, "avx_vnni")) return &limits::avx_vnni;
  if (kind == "avx2_int8" && has(features, "avx2")) return &limits::avx2_int8;
  if (kind == "avx512_bf16" && has(features, "avx512_bf16")) return &limits::avx512_bf16;
  if (kind == "fp32_fma" && has(features, "avx512f")) return &limits::avx512_fma;
  if (kind == "fp32_fma" && has(features, "avx2") && has(features, "fma")) return &limits::avx2_fma;
  return nullptr;
}

uint64_t (*read_kernel())(const uint8_t*, int64_t) {
  const std::vector<std::string> features = cpu_features();
  if (has(features, "avx512f")) return &limits::read_avx512;
  return has(features, "avx2") ? &limits::read_avx2 : &limits::read_generic;
}

// Runs `work(i)` on a pinned thread per CPU, all starting together; returns when all have ended.
void on_each(const std::vector<int>& cpus, const std::function<void(size_t)>& work) {
  if (cpus.empty()) throw std::invalid_argument("a measurement needs at least one CPU");
  std::atomic<size_t> ready{0};
  std::atomic<bool> abandoned{false};
  std::vector<std::thread> threads;
  try {
    for (size_t i = 0; i < cpus.size(); ++i) {
      threads.emplace_back([&, i] {
        pin_thread(pthread_self(), cpus[i]);  // where it is not allowed, the thread runs unpinned
        ready.fetch_add(1);
        while (ready.load() < cpus.size() && !abandoned.load()) std::this_thread::yield();
        if (!abandoned.load()) work(i);
      });
    }
  } catch (const std::exception& error) {
    abandoned.store(true);
    for (std::thread& t : threads) t.join();
    throw std::runtime_error(std::string("cannot start a measuring thread: ") + error.what());
  }
  for (std::thread& t : threads) t.join();
}

}  // namespace

std::vector<std::string> compute_kinds() {
  std::vector<std::string> kinds;
  for (const char* kind :
       {"amx_int8", "amx_bf16", "avx512_vnni", "avx_vnni", "avx2_int8", "avx512_bf16", "fp32_fma"})
    if (compute_kernel(kind) != nullptr) kinds.push_back(kind);
  return kinds;
}

double measure_compute(const std::string& kind, const std::vector<int>& cpus, double seconds) {
  const ComputeKernel kernel = compute_kernel(kind);
  if (kernel == nullptr) throw std::invalid_argument("this CPU or kernel does not offer '" + kind + "'");
  std::vector<double> rates(cpus.size(), 0.0);
  on_each(cpus, [&](size_t i) {
    constexpr int64_t kSteps = 20000;  // well under a millisecond of any kind
    kernel(kSteps);
    const int64_t start = now_ns(), deadline = start + static_cast<int64_t>(seconds * 1e9);
    double operations = 0.0;
    int64_t now;
    do {
      operations += kernel(kSteps);
      now = now_ns();
    } while (now < deadline);
    rates[i] = operations / (static_cast<double>(now - start) * 1e-9);
  });
  double total = 0.0;
  for (double rate : rates) total += rate;
  return total;
}

ReadProbe::ReadProbe(int64_t nbytes, bool huge) : nbytes_(nbytes / kHugePage * kHugePage) {
  if (nbytes < kHugePage) throw std::invalid_argument("a read probe needs at least 2 MB");
  if (huge) {
    huge_ = Mapping(nbytes_);
    data_ = huge_.data();
  } else {
    void* p = mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    madvise(p, nbytes_, MADV_NOHUGEPAGE);
    data_ = small_ = static_cast<uint8_t*>(p);
  }
  // An untouched page is the shared zero page, which lies in the cache.
  for (int64_t at = 0; at < nbytes_; at += 4096) data_[at] = static_cast<uint8_t>(at >> 12);
  // The first read of what was written takes up to twice as long on some servers. Weights are read many
  // times.
  const volatile uint64_t first = read_kernel()(data_, nbytes_);
  (void)first;
}

ReadProbe::~ReadProbe() {
  if (small_ != nullptr) munmap(small_, nbytes_);
}

double ReadProbe::sample(const std::vector<int>& cpus) {
  const auto read = read_kernel();
  const int64_t count = static_cast<int64_t>(cpus.size());
  const int64_t share = std::min(kReadPerThread, nbytes_ / std::max<int64_t>(count, 1) / 4096 * 4096);
  if (next_ + share * count > nbytes_) next_ = 0;
  const uint8_t* first = data_ + next_;
  next_ += share * count;
  std::vector<int64_t> begin(cpus.size()), end(cpus.size());
  std::atomic<uint64_t> sink{0};
  on_each(cpus, [&](size_t i) {
    begin[i] = now_ns();
    sink.fetch_xor(read(first + share * static_cast<int64_t>(i), share));
    end[i] = now_ns();
  });
  const int64_t elapsed =
      *std::max_element(end.begin(), end.end()) - *std::min_element(begin.begin(), begin.end());
  return static_cast<double>(share * count) / (static_cast<double>(std::max<int64_t>(elapsed, 1)) * 1e-9);
}

}  // namespace ktc
