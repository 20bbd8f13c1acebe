// What this machine can do at most: memory read rate and peak arithmetic. Rooflines are drawn from these.
//
// Measured with code of the same kind as the kernels use, but without a kernel's work around it. The
// library's own threads are made for each sample and pinned; the pool (pool.h) is not involved.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "arena.h"

namespace ktc {

// Kinds of arithmetic that this process may use, of: "amx_int8", "amx_bf16", "avx512_vnni", "avx_vnni",
// "avx2_int8" (bytes widened to 16 bits), "avx512_bf16", "fp32_fma".
std::vector<std::string> compute_kinds();

// Operations a second (a multiply and an add are two) with one thread on each of `cpus`, for about
// `seconds`. Throws std::invalid_argument for a kind that is not in compute_kinds() or for no CPUs,
// std::runtime_error if a thread cannot start.
double measure_compute(const std::string& kind, const std::vector<int>& cpus, double seconds);

// A buffer to read through. Larger than any cache, it measures DRAM.
class ReadProbe {
 public:
  // `huge`: 2 MB pages where the kernel gives them; else 4 KB pages for certain. All of it is read once.
  // Throws std::bad_alloc, std::invalid_argument for less than 1 MB.
  ReadProbe(int64_t nbytes, bool huge);
  ~ReadProbe();
  ReadProbe(const ReadProbe&) = delete;
  ReadProbe& operator=(const ReadProbe&) = delete;

  // Bytes a second of reading the next few milliseconds' worth of the buffer, divided over one thread on each
  // of `cpus`. Samples go round the buffer in turn, so that each reads what was not read for longest; short
  // ones are rarely interrupted. Not thread-safe.
  double sample(const std::vector<int>& cpus);
  int64_t nbytes() const { return nbytes_; }

 private:
  int64_t nbytes_;
  int64_t next_ = 0;  // where the next sample starts
  Mapping huge_;      // in use if small_ is null
  uint8_t* small_ = nullptr;
  uint8_t* data_ = nullptr;
};

// ---- machine_limits_kernels.cpp: the inner loops; each needs the features in its name -------------------
namespace limits {

// Each runs `steps` steps and returns the operations done.
double amx_int8(int64_t steps);
double amx_bf16(int64_t steps);
double avx512_vnni(int64_t steps);
double avx512_bf16(int64_t steps);
double avx_vnni(int64_t steps);
double avx2_int8(int64_t steps);
double avx512_fma(int64_t steps);
double avx2_fma(int64_t steps);

// Read n bytes (a multiple of 4096, 64-byte aligned) as four streams; the sum keeps the loads alive.
uint64_t read_avx512(const uint8_t* data, int64_t n);
uint64_t read_avx2(const uint8_t* data, int64_t n);
uint64_t read_generic(const uint8_t* data, int64_t n);

}  // namespace limits
}  // namespace ktc
