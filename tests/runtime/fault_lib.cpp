// A kernel library around another one (KTC_FAULT_INNER) whose n-th matrix product goes wrong on request.
//
// For tests of what the runtime and the decode graph do then; the shipped libraries have no such hook. A test
// arms it through `ktc_fault_arm`, which it finds in this library like any other symbol.
#include <dlfcn.h>
#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <limits>
#include <utility>
#include <vector>

#include "ktc/abi.h"

namespace {

enum Fault { kNone, kStatus, kNan, kThreadEnds };

constexpr size_t kMaxKernels = 256;

std::atomic<int> fault{kNone};
std::atomic<int64_t> countdown{0};
std::atomic<int> happened{0};
pthread_t armed_by;

const ktc_gemm_kernel* inner_kernels = nullptr;

// Whether this product is the one that goes wrong.
bool due() {
  if (fault.load(std::memory_order_relaxed) == kNone) return false;
  if (fault.load() == kThreadEnds && pthread_equal(pthread_self(), armed_by)) {
    usleep(50);  // only a worker may end: leave it some work
    return false;
  }
  return countdown.fetch_sub(1) == 1;
}

// As a kernel whose arithmetic went wrong would leave it: one NaN, and its row known to hold one.
void write_nan(const ktc_gemm_args& a) {
  const int64_t column = 32 * a.block_begin;
  if (a.row_amax != nullptr) a.row_amax[a.m_begin] = std::numeric_limits<float>::quiet_NaN();
  if (a.row_index != nullptr) {
    a.out[a.row_index[a.m_begin] * a.ld_out + column] = std::numeric_limits<float>::quiet_NaN();
  } else {
    a.out[a.m_begin * a.ld_out + (a.row_amax != nullptr ? 16 * a.block_begin : column)] =
        std::numeric_limits<float>::quiet_NaN();
  }
}

template <size_t I>
int gemm(const ktc_gemm_args* args) {
  if (!due()) return inner_kernels[I].gemm(args);
  const int kind = fault.exchange(kNone);
  happened.fetch_add(1);
  if (kind == kStatus) return KTC_ERR_ARGS;
  if (kind == kThreadEnds) pthread_exit(nullptr);
  const int status = inner_kernels[I].gemm(args);
  write_nan(*args);
  return status;
}

template <size_t... I>
std::vector<int (*)(const ktc_gemm_args*)> wrappers(std::index_sequence<I...>) {
  return {gemm<I>...};
}

ktc_kernel_lib lib;
std::vector<ktc_gemm_kernel> kernels;

}  // namespace

extern "C" {

// The `after`-th product from now (1 = the next) goes wrong in the way of `kind`, once. kThreadEnds: the
// `after`-th that is not on the thread that calls this.
void ktc_fault_arm(int kind, int64_t after) {
  armed_by = pthread_self();
  countdown.store(after);
  fault.store(kind);
}

int ktc_fault_happened() { return happened.load(); }

const ktc_kernel_lib* ktc_kernel_query(uint32_t abi_version) {
  const char* path = std::getenv("KTC_FAULT_INNER");
  void* handle = path != nullptr ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
  if (handle == nullptr) return nullptr;
  const auto query = reinterpret_cast<ktc_kernel_query_fn>(dlsym(handle, KTC_QUERY_SYMBOL));
  const ktc_kernel_lib* inner = query != nullptr ? query(abi_version) : nullptr;
  if (inner == nullptr || inner->kernel_count > kMaxKernels) return nullptr;
  inner_kernels = inner->kernels;
  const auto wrapped = wrappers(std::make_index_sequence<kMaxKernels>{});
  kernels.assign(inner->kernels, inner->kernels + inner->kernel_count);
  for (size_t i = 0; i < kernels.size(); ++i) kernels[i].gemm = wrapped[i];
  lib = *inner;
  lib.kernels = kernels.data();
  return &lib;
}

}  // extern "C"
