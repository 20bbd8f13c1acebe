// A kernel library: dlopen, ABI check, and the choice of a kernel for a matrix and a row count.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ktc/abi.h"
#include "pack.h"

namespace ktc {

class KernelLib {
 public:
  // Throws std::runtime_error naming the file and the reason: not a library, another ABI or layout, or
  // instructions that this machine lacks. Asks for AMX permission where it is needed. The library stays
  // loaded for the life of the process: worker threads may hold its per-thread state.
  explicit KernelLib(const std::string& path);

  const ktc_kernel_lib* raw() const { return lib_; }
  const std::string& path() const { return path_; }
  const std::vector<const ktc_gemm_kernel*>& kernels() const { return kernels_; }
  std::vector<std::string> required_features() const;

 private:
  void check_machine() const;

  std::string path_;
  const ktc_kernel_lib* lib_ = nullptr;
  std::vector<const ktc_gemm_kernel*> kernels_;
};

// What replaces a kernel's own min_rows on this machine: prefix of kernel names -> rows. The longest prefix
// that fits wins.
using MinRows = std::map<std::string, int64_t>;

// Kernels of one matrix: all of a library's that can run it, smallest min_rows first.
class KernelChoice {
 public:
  // Throws std::invalid_argument if the library has none, or none whose name contains `force`.
  KernelChoice(const KernelLib& lib, const Scheme& scheme, ktc_epilogue epilogue, int64_t k_pad,
               const std::string& force, const MinRows& min_rows = {});

  // The kernel with the largest min_rows <= rows; specialised on k before generic.
  const ktc_gemm_kernel& pick(int64_t rows) const { return *entries_[index(rows)].kernel; }
  void count(int64_t rows) const { entries_[index(rows)].calls->fetch_add(1, std::memory_order_relaxed); }
  int64_t scratch_bytes() const;
  int (*quantize() const)(const ktc_quant_args*) { return entries_[0].kernel->quantize; }

  struct Use {
    std::string name;
    int64_t calls;
  };
  std::vector<Use> report() const;
  // Adds kernel name -> the rows from which it is preferred.
  void add_min_rows(std::map<std::string, int64_t>& all) const;

 private:
  struct Entry {
    const ktc_gemm_kernel* kernel;
    int64_t min_rows;
    std::unique_ptr<std::atomic<int64_t>> calls;
  };
  size_t index(int64_t rows) const;
  std::vector<Entry> entries_;
};

// Turns a kernel's status into an exception.
void check_kernel(int status, const char* kernel);

const char* epilogue_name(int epilogue);

}  // namespace ktc
