#include "ops/prefill.h"

#include <algorithm>

namespace ktc::ops {

namespace {

constexpr int64_t kStretch = 512;               // keys prepared at once: a head's stay in L2
constexpr int64_t kBudget = int64_t{16} << 20;  // bytes of a group of heads, if one head takes no more
constexpr int64_t kSerialWork = 1 << 15;
constexpr int64_t kBlocks = kStretch / kTileKeys;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t up(int64_t n, int64_t to) { return ceil_div(n, to) * to; }

}  // namespace

TileSizes tile_sizes(bool bf16, int64_t dk, int64_t dv, int64_t rank, int64_t nope) {
  if (!bf16)
    return {dk * kTileQueries * 4, (dv + 2) * kTileQueries * 4, kTileKeys * dk * 4, kTileKeys * dv * 4, 0, 0};
  const int64_t k = up(dk, 32), rows = up(dv, 16), wide = up(rank, 32);
  return {k * kTileQueries * 2, (rows + 2) * kTileQueries * 4,    k * kTileKeys * 2,
          rows * kTileKeys * 2, (up(nope, 32) + rows) * wide * 2, 2 * kTileKeys * wide * 2};
}

PrefillPlan plan_prefill(bool bf16, const PrefillShape& s, int64_t rows, int threads) {
  PrefillPlan p{};
  p.size = tile_sizes(bf16, s.dk, s.dv, s.rank, s.nope);
  p.tiles = ceil_div(rows * s.group, kTileQueries);
  p.packs = bf16 || s.rank > 0;
  const int64_t block = p.packs ? p.size.key + p.size.value : 0;
  const int64_t head = p.tiles * (p.size.query + p.size.state) + kBlocks * block + p.size.weights;
  const int64_t groups = ceil_div(s.heads, std::max<int64_t>(1, std::min(s.heads, kBudget / head)));
  p.heads = ceil_div(s.heads, groups);
  int64_t at = 64;  // room to align the base
  const auto take = [&](int64_t bytes) {
    const int64_t here = at;
    at += up(bytes, 64);
    return here;
  };
  p.query = take(p.heads * p.tiles * p.size.query);
  p.state = take(p.heads * p.tiles * p.size.state);
  p.key = take(p.packs ? p.heads * kBlocks * p.size.key : 0);
  p.value = take(p.packs ? p.heads * kBlocks * p.size.value : 0);
  p.bad = take(p.heads * kBlocks);
  p.weights = take(p.heads * p.size.weights);
  p.latents = take(kBlocks * p.size.latents);
  p.rows = take(threads * kTileQueries * s.dk * 4);
  p.bytes = at;
  return p;
}

void prefill(const Tiles& t, const Parallel& parallel, const PrefillCall& c) {
  const PrefillShape& s = c.shape;
  const PrefillPlan p = plan_prefill(t.bf16, s, c.rows, parallel.threads);
  char* const base = reinterpret_cast<char*>(reinterpret_cast<uintptr_t>(c.scratch) / 64 * 64);
  const int64_t pairs = c.rows * s.group, end = c.position + c.rows;
  const int64_t begin =
      c.window > 0 ? std::max<int64_t>(0, c.position - c.window + 1) / kTileKeys * kTileKeys : 0;
  const bool serial = pairs * s.heads * (end - begin) * (s.dk + s.dv) < kSerialWork;
  const bool expands = s.rank > 0;
  uint8_t* const bad = reinterpret_cast<uint8_t*>(base + p.bad);
  const auto latent = [&](int64_t head, int64_t key, int64_t keys) {
    const int64_t width = s.rank + s.dk - s.nope;
    const Matrix w = c.kv_b.rows(head * (s.nope + s.dv));
    return LatentArgs{w,      w.rows(s.nope), c.cache + key * width, width, keys,
                      s.rank, s.nope,         s.dk - s.nope,         s.dv};
  };
  const auto query_of = [&](int64_t task) { return base + p.query + task * p.size.query; };
  const auto state_of = [&](int64_t task) { return base + p.state + task * p.size.state; };
  const auto weights_of = [&](int64_t head) { return base + p.weights + head * p.size.weights; };
  const auto latents_of = [&](int64_t block) { return base + p.latents + block * p.size.latents; };

  for (int64_t first_head = 0; first_head < s.heads; first_head += p.heads) {
    const int64_t heads = std::min(p.heads, s.heads - first_head);
    parallel_for(parallel, heads * p.tiles, serial, [&](int64_t task, int thread) {
      // By tiles, then heads: a token's queries lie together.
      const int64_t h = task % heads, head = first_head + h, tile = task / heads, first = tile * kTileQueries;
      const int64_t count = std::min(kTileQueries, pairs - first), place = h * p.tiles + tile;
      float* const rows = reinterpret_cast<float*>(base + p.rows) + thread * kTileQueries * s.dk;
      float sinks[kTileQueries] = {};
      for (int64_t i = 0; i < count; ++i) {
        c.query(c.context, head, first + i, rows + i * s.dk);
        if (c.sinks) sinks[i] = c.sinks[head * s.group + (first + i) % s.group] * t.log_scale;
      }
      t.pack_queries(rows, count, s.dk, c.scale * t.log_scale, query_of(place));
      t.begin(c.sinks ? sinks : nullptr, s.dv, state_of(place));
    });
    if (expands && t.pack_weights)
      parallel_for(parallel, heads, serial,
                   [&](int64_t h, int) { t.pack_weights(latent(first_head + h, 0, 0), weights_of(h)); });

    for (int64_t from = begin; from < end; from += kStretch) {
      const int64_t to = std::min(end, from + kStretch), blocks = ceil_div(to - from, kTileKeys);
      if (expands && t.pack_latents)
        parallel_for(parallel, blocks, serial, [&](int64_t b, int) {
          const int64_t key = from + b * kTileKeys;
          t.pack_latents(latent(0, key, std::min(kTileKeys, to - key)), latents_of(b));
        });
      if (p.packs)
        parallel_for(parallel, heads * blocks, serial, [&](int64_t task, int) {
          const int64_t h = task / blocks, head = first_head + h, b = task % blocks, place = h * kBlocks + b;
          const int64_t key = from + b * kTileKeys, keys = std::min(kTileKeys, to - key);
          void* const k = base + p.key + place * p.size.key;
          void* const v = base + p.value + place * p.size.value;
          bad[place] =
              expands ? t.expand(latent(head, key, keys), weights_of(h), latents_of(b), k, v)
                      : t.pack_keys(c.k + head * c.head_k + key * c.ld_k, c.ld_k,
                                    c.v + head * c.head_v + key * c.ld_v, c.ld_v, keys, s.dk, s.dv, k, v);
        });
      parallel_for(parallel, heads * p.tiles, serial, [&](int64_t task, int) {
        const int64_t h = task / p.tiles, head = first_head + h, first = task % p.tiles * kTileQueries;
        const int64_t count = std::min(kTileQueries, pairs - first);
        TileArgs a{};
        a.query = query_of(task);
        if (p.packs) {
          a.keys = base + p.key + h * kBlocks * p.size.key;
          a.values = base + p.value + h * kBlocks * p.size.value;
          a.block_keys = p.size.key;
          a.block_values = p.size.value;
          a.ld_k = s.dk;
          a.ld_v = s.dv;
          a.bad = bad + h * kBlocks;
        } else {
          a.keys = c.k + head * c.head_k + from * c.ld_k;
          a.values = c.v + head * c.head_v + from * c.ld_v;
          a.block_keys = kTileKeys * c.ld_k * 4;
          a.block_values = kTileKeys * c.ld_v * 4;
          a.ld_k = c.ld_k;
          a.ld_v = c.ld_v;
        }
        a.dk = s.dk;
        a.dv = s.dv;
        a.pairs = count;
        a.first_pair = first;
        a.group = s.group;
        a.position = c.position;
        a.window = c.window;
        a.k_begin = from;
        a.k_end = to;
        a.state = state_of(task);
        t.attend(a);
        if (to == end)
          t.finish(state_of(task), {c.out + head * s.group * s.dv, c.ld_out, s.dv, count, first, s.group});
      });
    }
  }
}

}  // namespace ktc::ops
