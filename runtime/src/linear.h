// y = x W^T + b on packed tiles: one dense linear, over all threads of the pool.
#pragma once

#include <memory>
#include <string>

#include "kernel_lib.h"
#include "pool.h"

namespace ktc {

class Linear {
 public:
  // n, k: logical sizes; weight pointers as in abi.h, kept alive by the caller.
  Linear(std::shared_ptr<KernelLib> lib, std::shared_ptr<Pool> pool, int64_t n, int64_t k,
         const Scheme& scheme, const ktc_weight& weight, const std::string& force,
         const MinRows& min_rows = {});

  // x f32 [m, k] with row stride ld_x, y f32 [m, n] with row stride ld_y. m = 0 does nothing.
  void forward(const float* x, int64_t ld_x, int64_t m, float* y, int64_t ld_y);
  // The same in two halves, so that the threads that are done with one linear begin the next: x and y must
  // stay until `wait`, which must follow, once. Null for m = 0.
  Job* submit(const float* x, int64_t ld_x, int64_t m, float* y, int64_t ld_y);
  void wait(Job* job);

  const KernelChoice& kernels() const { return kernels_; }
  const Pool& pool() const { return *pool_; }

 private:
  struct Call;
  static void quantize_task(void* context, const Task& task);
  static void gemm_task(void* context, const Task& task);
  void plan_chunk(Call& call, Job& job, int quantize_phase, int gemm_phase);

  const std::shared_ptr<KernelLib> lib_;
  const std::shared_ptr<Pool> pool_;
  const int64_t n_, k_, k_pad_, blocks_;
  const Scheme scheme_;
  const ktc_weight weight_;
  const KernelChoice kernels_;
};

}  // namespace ktc
