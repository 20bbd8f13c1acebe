#include "ops/attention.h"

#include <algorithm>
#include <cmath>

#include "ops/prefill.h"

namespace ktc::ops {

namespace {

constexpr int64_t kMaxTasks = 64;    // of a call whose keys are split
constexpr int64_t kSplitKeys = 16;   // a part's keys are a multiple: of softmax's lanes
constexpr int64_t kMlaPairs = 2048;  // query rows x heads of MLA alive at a time
constexpr int64_t kSerialWork = 1 << 15;

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Few tiles (decode): the keys of a tile are cut into parts of four blocks or fewer, as many as a power of
// two if there may be so many, and equally long, so that an even number of threads has equally much to do.
// base * splits <= base + kMaxTasks / 2 <= kMaxTasks.
int64_t key_splits(int64_t keys, int64_t base) {
  const int64_t most = std::max<int64_t>(kMaxTasks / 2 / base, 1);
  int64_t splits = 1;
  while (splits < most && splits * 4 * kKeyBlock < keys) splits *= 2;
  return std::min(splits, most);
}

const Tiles* tiles_for(const Table& table, Prefill prefill, int64_t rows) {
  if (prefill == Prefill::kRows || rows < kTileRows) return nullptr;
  return prefill == Prefill::kBF16 && table.tiles_bf16 ? table.tiles_bf16 : table.tiles_f32;
}

// Floats of either way, whichever takes more: a bf16 call may find itself on a CPU without.
int64_t prefill_floats(Prefill prefill, const PrefillShape& s, int64_t rows, int threads) {
  int64_t bytes = plan_prefill(false, s, rows, threads).bytes;
  if (prefill == Prefill::kBF16) bytes = std::max(bytes, plan_prefill(true, s, rows, threads).bytes);
  return ceil_div(bytes, 4);
}

// Multiply-adds per head and key: expanding once and multiplying in heads, against multiplying in latents.
bool worth_expanding(const Tiles& tiles, const MlaShape& s, int64_t rows) {
  const int64_t expanded = s.rank * (s.nope + s.v_dim) + rows * (s.nope + s.rope_dim + s.v_dim);
  // In latents the products are f32 by rows, far slower than bf16 ones.
  return tiles.bf16 || expanded < rows * (2 * s.rank + s.rope_dim);
}

}  // namespace

// Per task or thread: acc [kPairTile][dv], m and l [kPairTile] each; per thread: scores.
int64_t attention_scratch(int threads, int64_t dv) {
  const int64_t slots = std::max<int64_t>(kMaxTasks, threads);
  return slots * kPairTile * (dv + 2) + threads * kPairTile * kKeyBlock;
}

void attention(const Table& table, const Parallel& parallel, const AttentionCall& c) {
  const int64_t pairs = c.rows * c.group, tiles = ceil_div(pairs, kPairTile), base = c.kv_heads * tiles;
  const int64_t end = c.position + c.rows;
  const int64_t begin =
      c.window > 0 ? std::max<int64_t>(0, c.position - c.window + 1) / kKeyBlock * kKeyBlock : 0;
  const int64_t splits = key_splits(end - begin, base);
  const int64_t per_split = ceil_div(ceil_div(end - begin, splits), kSplitKeys) * kSplitKeys;
  const int64_t slot_floats = kPairTile * (c.dv + 2);
  float* const all_scores = c.scratch + std::max<int64_t>(kMaxTasks, parallel.threads) * slot_floats;
  const bool serial = pairs * c.kv_heads * (end - begin) * (c.dk + c.dv) < kSerialWork;

  parallel_for(parallel, base * splits, serial, [&](int64_t task, int thread) {
    const int64_t split = task % splits, tile = task / splits % tiles, head = task / splits / tiles;
    const int64_t first = tile * kPairTile, count = std::min(kPairTile, pairs - first);
    float* const slot = c.scratch + (splits > 1 ? task : thread) * slot_floats;
    float* const m = slot + kPairTile * c.dv;
    float* const l = m + kPairTile;
    for (int64_t p = 0; p < count; ++p) {
      const bool sink = c.sinks != nullptr && split == 0;
      m[p] = sink ? c.sinks[head * c.group + (first + p) % c.group] : -INFINITY;
      l[p] = sink ? 1.0f : 0.0f;
    }
    std::fill(slot, slot + count * c.dv, 0.0f);
    AttendArgs a{};
    a.q = c.q + (head * pairs + first) * c.dk;
    a.k = c.k + head * c.head_stride_k;
    a.v = c.v + head * c.head_stride_v;
    a.ld_k = c.ld_k;
    a.ld_v = c.ld_v;
    a.dk = c.dk;
    a.dv = c.dv;
    a.pairs = count;
    a.first_pair = first;
    a.group = c.group;
    a.position = c.position;
    a.window = c.window;
    a.k_begin = begin + split * per_split;
    a.k_end = std::min(end, a.k_begin + per_split);
    a.scale = c.scale;
    a.m = m;
    a.l = l;
    a.acc = slot;
    a.scores = all_scores + thread * kPairTile * kKeyBlock;
    if (a.k_begin < a.k_end) table.attend(a);
    if (splits > 1) return;
    for (int64_t p = 0; p < count; ++p) {
      const int64_t pair = first + p;
      float* const out = c.out + pair / c.group * c.ld_out + (head * c.group + pair % c.group) * c.dv;
      table.axpby(slot + p * c.dv, 1.0f / l[p], nullptr, 0.0f, c.dv, out);
    }
  });
  if (splits == 1) return;
  parallel_range(
      parallel, c.kv_heads * pairs, serial ? c.kv_heads * pairs : 4, [&](int64_t lo, int64_t hi, int) {
        for (int64_t i = lo; i < hi; ++i) {
          const int64_t head = i / pairs, pair = i % pairs, tile = pair / kPairTile, p = pair % kPairTile;
          const float* const slot = c.scratch + (head * tiles + tile) * splits * slot_floats;
          const float* const m = slot + kPairTile * c.dv + p;
          float* const out = c.out + pair / c.group * c.ld_out + (head * c.group + pair % c.group) * c.dv;
          table.merge(m, m + kPairTile, slot + p * c.dv, splits, slot_floats, slot_floats, c.dv, out);
        }
      });
}

int64_t gqa_scratch(const GqaShape& s, int threads, int64_t max_rows) {
  const bool tiles = s.prefill != Prefill::kRows && max_rows >= kTileRows;
  const int64_t rows = tiles ? kTileRows : max_rows;
  const int64_t by_rows = attention_scratch(threads, s.head_dim) + rows * s.heads * s.head_dim;
  const PrefillShape shape{s.kv_heads, s.heads / s.kv_heads, s.head_dim, s.head_dim, 0, 0};
  return tiles ? std::max(by_rows, prefill_floats(s.prefill, shape, max_rows, threads)) : by_rows;
}

// What calls by tiles have in common; where keys and values are is for the caller to say.
template <typename Call>
static PrefillCall prefill_call(const PrefillShape& shape, const Call& c, float scale) {
  PrefillCall call{};
  call.shape = shape;
  call.rows = c.rows;
  call.position = c.position;
  call.scale = scale;
  call.out = c.out;
  call.ld_out = shape.heads * shape.group * shape.dv;
  call.scratch = c.scratch;
  return call;
}

// `query(head, pair, row)` makes the query of a pair; it outlives the call.
template <typename Query>
static const char* by_tiles(const Tiles& tiles, const Parallel& parallel, PrefillCall& call,
                            const Query& query) {
  call.context = &query;
  call.query = [](const void* context, int64_t head, int64_t pair, float* row) {
    (*static_cast<const Query*>(context))(head, pair, row);
  };
  prefill(tiles, parallel, call);
  return tiles.name;
}

const char* gqa(const Table& table, const Parallel& parallel, const GqaShape& s, const GqaCall& c) {
  const int64_t d = s.head_dim, group = s.heads / s.kv_heads;
  const auto prepare = [&](const float* x, const float* norm, int64_t t, bool rotate, float* y) {
    const float* from = x;
    if (norm) {
      table.norm({from, nullptr, nullptr, nullptr, 1.0f, norm, s.norm_eps, d, 1, y}, 0, 1);
      from = y;
    }
    if (s.clip > 0.0f) {
      table.clamp(from, s.clip, d, y);
      from = y;
    }
    const int64_t half = rotate ? s.rotary_half : 0;
    table.rope(from, d, half, c.cos + t * s.rotary_half, c.sin + t * s.rotary_half, s.rope, y);
  };
  const auto query = [&](int64_t head, int64_t pair, float* y) {
    const int64_t t = pair / group;
    prepare(c.q + (t * s.heads + head * group + pair % group) * d, c.q_norm, t, true, y);
  };
  const Tiles* const tiles = tiles_for(table, s.prefill, c.rows);
  float* const q =
      c.scratch + attention_scratch(parallel.threads, d);  // by rows: [kv_heads][rows * group][d]
  const int64_t grain = std::max<int64_t>(1, kSerialWork / ((s.heads + 2 * s.kv_heads) * d));
  parallel_range(parallel, c.rows, grain, [&](int64_t lo, int64_t hi, int) {
    for (int64_t t = lo; t < hi; ++t)
      for (int64_t h = 0; h < s.kv_heads; ++h) {
        const int64_t at = (h * c.context + c.position + t) * d;
        prepare(c.k + (t * s.kv_heads + h) * d, c.k_norm, t, true, c.k_cache + at);
        prepare(c.v + (t * s.kv_heads + h) * d, nullptr, t, false, c.v_cache + at);
        for (int64_t pair = t * group; !tiles && pair < (t + 1) * group; ++pair)
          query(h, pair, q + (h * c.rows * group + pair) * d);
      }
  });
  if (!tiles) {
    attention(table, parallel,
              {q, s.kv_heads, group, c.rows, d, d, c.k_cache, c.v_cache, d, d, c.context * d, c.context * d,
               c.position, s.window, s.scale, c.sinks, c.out, s.heads * d, c.scratch});
    return "rows";
  }
  PrefillCall call = prefill_call({s.kv_heads, group, d, d, 0, 0}, c, s.scale);
  call.window = s.window;
  call.sinks = c.sinks;
  call.k = c.k_cache;
  call.v = c.v_cache;
  call.ld_k = call.ld_v = d;
  call.head_k = call.head_v = c.context * d;
  return by_tiles(*tiles, parallel, call, query);
}

int64_t mla_scratch(const MlaShape& s, int threads, int64_t max_rows) {
  const int64_t rows = std::min(max_rows, std::max<int64_t>(1, kMlaPairs / s.heads));
  const int64_t by_rows =
      attention_scratch(threads, s.rank) + rows * s.heads * (s.rank + s.rope_dim + s.rank);
  if (s.prefill == Prefill::kRows || max_rows < kTileRows) return by_rows;
  const PrefillShape shape{s.heads, 1, s.nope + s.rope_dim, s.v_dim, s.rank, s.nope};
  return std::max(by_rows, prefill_floats(s.prefill, shape, max_rows, threads));
}

const char* mla(const Table& table, const Parallel& parallel, const MlaShape& s, const MlaCall& c) {
  const int64_t width = s.rank + s.rope_dim, half = s.rope_dim / 2, q_dim = s.nope + s.rope_dim;
  parallel_range(
      parallel, c.rows, std::max<int64_t>(1, kSerialWork / width), [&](int64_t lo, int64_t hi, int) {
        for (int64_t t = lo; t < hi; ++t) {
          const float* const kv = c.kv + t * width;
          float* const row = c.cache + (c.position + t) * width;
          table.norm({kv, nullptr, nullptr, nullptr, 1.0f, c.kv_norm, s.norm_eps, s.rank, 1, row}, 0, 1);
          table.rope(kv + s.rank, s.rope_dim, half, c.cos + t * half, c.sin + t * half, s.rope, row + s.rank);
        }
      });
  const Tiles* const tiles = tiles_for(table, s.prefill, c.rows);
  if (tiles && worth_expanding(*tiles, s, c.rows)) {
    const auto query = [&](int64_t head, int64_t t, float* y) {
      const float* const x = c.q + (t * s.heads + head) * q_dim;
      std::copy_n(x, s.nope, y);
      table.rope(x + s.nope, s.rope_dim, half, c.cos + t * half, c.sin + t * half, s.rope, y + s.nope);
    };
    PrefillCall call = prefill_call({s.heads, 1, q_dim, s.v_dim, s.rank, s.nope}, c, s.scale);
    call.kv_b = c.kv_b;
    call.cache = c.cache;
    return by_tiles(*tiles, parallel, call, query);
  }
  const int64_t step = std::max<int64_t>(1, kMlaPairs / s.heads);
  float* const q = c.scratch + attention_scratch(parallel.threads, s.rank);
  float* const latent = q + std::min(c.rows, step) * s.heads * width;
  for (int64_t begin = 0; begin < c.rows; begin += step) {
    const int64_t rows = std::min(step, c.rows - begin);
    const bool serial = rows * s.heads * s.nope * s.rank < kSerialWork;
    parallel_for(parallel, s.heads, serial, [&](int64_t h, int) {
      const float* const x = c.q + (begin * s.heads + h) * q_dim;
      float* const y = q + h * width;
      table.gemm_nn(x, s.heads * q_dim, rows, c.kv_b.rows(h * (s.nope + s.v_dim)), s.nope, s.rank, false, y,
                    s.heads * width);
      for (int64_t t = 0; t < rows; ++t)
        table.rope(x + t * s.heads * q_dim + s.nope, s.rope_dim, half, c.cos + (begin + t) * half,
                   c.sin + (begin + t) * half, s.rope, y + t * s.heads * width + s.rank);
    });
    attention(table, parallel,
              {q, 1, s.heads, rows, width, s.rank, c.cache, c.cache, width, width, 0, 0, c.position + begin,
               0, s.scale, nullptr, latent, s.heads * s.rank, c.scratch});
    parallel_for(parallel, s.heads, serial, [&](int64_t h, int) {
      table.gemm_nt(latent + h * s.rank, s.heads * s.rank, rows, c.kv_b.rows(h * (s.nope + s.v_dim) + s.nope),
                    s.v_dim, s.rank, nullptr, c.out + (begin * s.heads + h) * s.v_dim, s.heads * s.v_dim);
    });
  }
  return "rows";
}

}  // namespace ktc::ops
