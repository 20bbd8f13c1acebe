// Chooses the operators' ISA once, by features, before any of its code runs. Built without ISA flags.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "cpu.h"
#include "ops/ops.h"
#include "ops/tiles.h"

namespace ktc::ops {

extern const Table kTable_baseline;
extern const Table kTable_avx2;
extern const Table kTable_avx512;
extern const Tiles kTiles_avx512_bf16;
extern const Tiles kTiles_amx;

namespace {

struct Choice {
  const Table* table;
  std::vector<const char*> features;
};

Table with_bf16(const Tiles& tiles) {
  Table table = kTable_avx512;
  table.name = tiles.name;
  table.tiles_bf16 = &tiles;
  return table;
}

const Table* choose(const char* force) {
  static const Table amx = with_bf16(kTiles_amx), avx512_bf16 = with_bf16(kTiles_avx512_bf16);
  const std::vector<const char*> avx512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx2", "fma"};
  std::vector<const char*> bf16 = avx512, tile = avx512;
  bf16.push_back("avx512_bf16");
  tile.insert(tile.end(), {"avx512_bf16", "amx_tile", "amx_bf16"});
  const Choice choices[] = {{&amx, tile},
                            {&avx512_bf16, bf16},
                            {&kTable_avx512, avx512},
                            {&kTable_avx2, {"avx2", "fma"}},
                            {&kTable_baseline, {}}};
  static const std::vector<std::string> have = cpu_features();
  for (const Choice& c : choices) {
    if (force && *force && std::strcmp(force, c.table->name) != 0) continue;
    const bool ok = std::all_of(c.features.begin(), c.features.end(), [&](const char* f) {
      return std::find(have.begin(), have.end(), f) != have.end();
    });
    if (ok && (c.table != &amx || amx_permission().first)) return c.table;
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
