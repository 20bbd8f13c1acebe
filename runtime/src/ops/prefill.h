// Attention of a chunk of rows by tiles (tiles.h), spread over threads, scratch bounded whatever the context.
//
// Work goes by groups of heads and, within one, by stretches of keys: a stretch is prepared once (packed, or
// expanded from the compressed cache) and then read by every tile of queries. All cuts follow from shapes,
// never from threads, so the bits do too.
#pragma once

#include <cstdint>

#include "ops/ops.h"
#include "ops/parallel.h"
#include "ops/tiles.h"

namespace ktc::ops {

struct PrefillShape {
  int64_t heads, group;  // KV heads, and queries of each
  int64_t dk, dv;
  int64_t rank, nope;  // where keys and values are expanded from a compressed cache, else 0
};

// How it is cut, and where things lie in the scratch.
struct PrefillPlan {
  TileSizes size;
  int64_t tiles, heads;  // tiles of a head; heads of a group
  bool packs;            // keys and values are not read in place
  int64_t query, state, key, value, bad, weights, latents, rows, bytes;  // offsets, and the whole
};
PrefillPlan plan_prefill(bool bf16, const PrefillShape& shape, int64_t rows, int threads);

struct PrefillCall {
  PrefillShape shape;
  int64_t rows, position, window;
  float scale;
  const float* sinks;  // [heads * group] or null
  const float* k;      // cached keys and values of head h at h * head_*
  const float* v;
  int64_t ld_k, ld_v, head_k, head_v;
  Matrix kv_b;         // expanded: [heads * (nope + dv)][rank], of
  const float* cache;  // [position + rows][rank + rope]
  float* out;          // head h at h * group * dv
  int64_t ld_out;
  void* scratch;
  // Writes the query of `pair` (token * group + member) of a head, ready for the product with keys.
  void (*query)(const void* context, int64_t head, int64_t pair, float* row);
  const void* context;
};
void prefill(const Tiles& tiles, const Parallel& parallel, const PrefillCall& call);

}  // namespace ktc::ops
