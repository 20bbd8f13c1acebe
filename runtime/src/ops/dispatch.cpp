// Chooses the operators' ISA once, by features, before any of its code runs. Built without ISA flags.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cpu.h"
#include "ops/ops.h"

namespace ktc::ops {

extern const Table kTable_baseline;
extern const Table kTable_avx2;
extern const Table kTable_avx512;

namespace {

struct Choice {
  const Table* table;
  std::vector<const char*> features;
};

const Table* choose(const char* force) {
  const Choice choices[] = {{&kTable_avx512, {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"}},
                            {&kTable_avx2, {"avx2", "fma"}},
                            {&kTable_baseline, {}}};
  static const std::vector<std::string> have = cpu_features();
  for (const Choice& c : choices) {
    if (force && *force && std::strcmp(force, c.table->name) != 0) continue;
    const bool ok = std::all_of(c.features.begin(), c.features.end(), [&](const char* f) {
      return std::find(have.begin(), have.end(), f) != have.end();
    });
    if (ok) return c.table;
  }
  return nullptr;
}

}  // namespace

const Table* table(const char* force) {
  if (force && *force) return choose(force);
  static const Table* const chosen = choose(std::getenv("KTC_OPS_ISA"));
  return chosen;
}

}  // namespace ktc::ops
