#include "cpu.h"

#include <cpuid.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>

namespace ktc {
namespace {

constexpr unsigned long kArchGetXcompSupp = 0x1021;
constexpr unsigned long kArchGetXcompPerm = 0x1022;
constexpr unsigned long kArchReqXcompPerm = 0x1023;
constexpr int kXtileData = 18;
constexpr uint64_t kXtileMask = (1ull << 17) | (1ull << 18);

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  __cpuid_count(leaf, subleaf, r.a, r.b, r.c, r.d);
  return r;
}

uint64_t read_xcr0() {
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

bool kernel_supports_tiles() {
  uint64_t mask = 0;
  if (syscall(SYS_arch_prctl, kArchGetXcompSupp, &mask) != 0) return false;
  return (mask & kXtileMask) == kXtileMask;
}

enum class State { kBasic, kAvx, kAvx512, kTile };

struct Feature {
  const char* name;
  unsigned leaf, subleaf;
  char reg;
  int bit;
  State state;
};

constexpr Feature kFeatures[] = {
    {"sse2", 1, 0, 'd', 26, State::kBasic},
    {"ssse3", 1, 0, 'c', 9, State::kBasic},
    {"sse4_1", 1, 0, 'c', 19, State::kBasic},
    {"sse4_2", 1, 0, 'c', 20, State::kBasic},
    {"popcnt", 1, 0, 'c', 23, State::kBasic},
    {"movbe", 1, 0, 'c', 22, State::kBasic},
    {"avx", 1, 0, 'c', 28, State::kAvx},
    {"f16c", 1, 0, 'c', 29, State::kAvx},
    {"fma", 1, 0, 'c', 12, State::kAvx},
    {"bmi1", 7, 0, 'b', 3, State::kBasic},
    {"bmi2", 7, 0, 'b', 8, State::kBasic},
    {"avx2", 7, 0, 'b', 5, State::kAvx},
    {"gfni", 7, 0, 'c', 8, State::kBasic},
    {"avx512f", 7, 0, 'b', 16, State::kAvx512},
    {"avx512dq", 7, 0, 'b', 17, State::kAvx512},
    {"avx512ifma", 7, 0, 'b', 21, State::kAvx512},
    {"avx512cd", 7, 0, 'b', 28, State::kAvx512},
    {"avx512bw", 7, 0, 'b', 30, State::kAvx512},
    {"avx512vl", 7, 0, 'b', 31, State::kAvx512},
    {"avx512vbmi", 7, 0, 'c', 1, State::kAvx512},
    {"avx512_vbmi2", 7, 0, 'c', 6, State::kAvx512},
    {"avx512_vnni", 7, 0, 'c', 11, State::kAvx512},
    {"avx512_bitalg", 7, 0, 'c', 12, State::kAvx512},
    {"avx512_vpopcntdq", 7, 0, 'c', 14, State::kAvx512},
    {"avx512_fp16", 7, 0, 'd', 23, State::kAvx512},
    {"amx_bf16", 7, 0, 'd', 22, State::kTile},
    {"amx_tile", 7, 0, 'd', 24, State::kTile},
    {"amx_int8", 7, 0, 'd', 25, State::kTile},
    {"avx_vnni", 7, 1, 'a', 4, State::kAvx},
    {"avx512_bf16", 7, 1, 'a', 5, State::kAvx512},
    {"amx_fp16", 7, 1, 'a', 21, State::kTile},
    {"avx_vnni_int8", 7, 1, 'd', 4, State::kAvx},
    {"sse4a", 0x80000001, 0, 'c', 6, State::kBasic},
};

std::vector<int> parse_cpu_list(const std::string& text) {
  std::vector<int> cpus;
  std::stringstream stream(text);
  std::string part;
  while (std::getline(stream, part, ',')) {
    int first = 0, last = 0;
    const int fields = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    if (fields < 1) continue;
    if (fields == 1) last = first;
    for (int cpu = first; cpu <= last; ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

}  // namespace

std::vector<std::string> cpu_features() {
  const unsigned max_leaf = cpuid(0, 0).a, max_extended = cpuid(0x80000000, 0).a;
  const Registers leaf1 = cpuid(1, 0);
  const bool osxsave = (leaf1.c >> 27) & 1u;
  const uint64_t xcr0 = osxsave ? read_xcr0() : 0;
  const bool avx = (xcr0 & 0x6) == 0x6;
  const bool avx512 = (xcr0 & 0xe6) == 0xe6;
  const bool tile = (xcr0 & kXtileMask) == kXtileMask && kernel_supports_tiles();
  const unsigned max_subleaf7 = max_leaf >= 7 ? cpuid(7, 0).a : 0;

  std::vector<std::string> names;
  for (const Feature& f : kFeatures) {
    const unsigned last_leaf = f.leaf < 0x80000000 ? max_leaf : max_extended;
    if (f.leaf > last_leaf || (f.leaf == 7 && f.subleaf > max_subleaf7)) continue;
    const Registers r = cpuid(f.leaf, f.subleaf);
    const unsigned word = f.reg == 'a' ? r.a : f.reg == 'b' ? r.b : f.reg == 'c' ? r.c : r.d;
    const bool enabled = f.state == State::kBasic || (f.state == State::kAvx && avx) ||
                         (f.state == State::kAvx512 && avx512) || (f.state == State::kTile && tile);
    if (((word >> f.bit) & 1u) && enabled) names.emplace_back(f.name);
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::pair<bool, std::string> amx_permission() {
  static const std::pair<bool, std::string> result = []() -> std::pair<bool, std::string> {
    const std::vector<std::string> features = cpu_features();
    if (!std::binary_search(features.begin(), features.end(), "amx_tile"))
      return {false, "the CPU or the kernel does not offer AMX tiles"};
    if (syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtileData) != 0)
      return {false, std::string("the kernel refused AMX tile state: ") + std::strerror(errno)};
    uint64_t mask = 0;
    if (syscall(SYS_arch_prctl, kArchGetXcompPerm, &mask) != 0 || !(mask & (1ull << kXtileData)))
      return {false, "the kernel granted AMX tile state but does not report it"};
    return {true, "granted"};
  }();
  return result;
}

std::vector<int> usable_cpus() {
  std::vector<int> cpus;
  for (int size = 1024; size <= (1 << 20); size *= 4) {
    cpu_set_t* set = CPU_ALLOC(size);
    const size_t bytes = CPU_ALLOC_SIZE(size);
    const int rc = sched_getaffinity(0, bytes, set);
    const int error = errno;
    if (rc == 0) {
      for (int cpu = 0; cpu < size; ++cpu)
        if (CPU_ISSET_S(cpu, bytes, set)) cpus.push_back(cpu);
    }
    CPU_FREE(set);
    if (rc == 0 || error != EINVAL) break;  // EINVAL: the kernel's mask is larger
  }
  if (cpus.empty()) cpus.push_back(0);
  return cpus;
}

std::vector<NumaNode> numa_nodes() {
  const std::vector<int> usable = usable_cpus();
  std::vector<NumaNode> nodes;
  std::ifstream online("/sys/devices/system/node/online");
  std::string text;
  if (online && std::getline(online, text)) {
    for (int id : parse_cpu_list(text)) {  // the same syntax: "0-1,4"
      std::ifstream list("/sys/devices/system/node/node" + std::to_string(id) + "/cpulist");
      std::string cpus;
      if (!list || !std::getline(list, cpus)) continue;
      NumaNode node{id, {}};
      for (int cpu : parse_cpu_list(cpus))
        if (std::binary_search(usable.begin(), usable.end(), cpu)) node.cpus.push_back(cpu);
      if (!node.cpus.empty()) nodes.push_back(std::move(node));
    }
  }
  if (nodes.empty()) nodes.push_back({0, usable});
  return nodes;
}

int pin_thread(pthread_t thread, int cpu) {
  if (cpu < 0) return EINVAL;
  const size_t bytes = CPU_ALLOC_SIZE(cpu + 1);
  cpu_set_t* set = CPU_ALLOC(cpu + 1);
  CPU_ZERO_S(bytes, set);
  CPU_SET_S(cpu, bytes, set);
  const int rc = pthread_setaffinity_np(thread, bytes, set);
  CPU_FREE(set);
  return rc;
}

}  // namespace ktc
