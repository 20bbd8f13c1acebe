// Causal attention over a cache, spread over threads: grouped-query and absorbed multi-head latent.
//
// Few rows (decode) go by rows: keys are split over threads, everything is f32. From kTileRows rows on
// (prefill) it goes by tiles (prefill.h), in f32 or bf16; latent attention then expands keys and values per
// stretch of keys where that is less work. How work is cut depends on shapes only, never on threads, so the
// bits do not either. Scratch is given by the caller.
#pragma once

#include <cstdint>

#include "ops/ops.h"
#include "ops/parallel.h"

namespace ktc::ops {

constexpr int64_t kTileRows = 16;

// How a call of many rows computes. kRows: as few rows do, the reference for the others.
enum class Prefill : int32_t { kF32 = 0, kBF16 = 1, kRows = 2 };

// Queries [kv_heads][rows * group][dk] against a cache of `position + rows` keys per KV head.
struct AttentionCall {
  const float* q;
  int64_t kv_heads, group, rows, dk, dv;
  const float* k;
  const float* v;
  int64_t ld_k, ld_v, head_stride_k, head_stride_v;
  int64_t position, window;  // window 0 = none
  float scale;
  const float* sinks;  // [kv_heads * group], or null
  float* out;          // row t, head h at out + t * ld_out + h * dv
  int64_t ld_out;
  float* scratch;  // attention_scratch floats
};
int64_t attention_scratch(int threads, int64_t dv);
void attention(const Table& table, const Parallel& parallel, const AttentionCall& call);

// Grouped-query attention of one layer: per-head norm, rope, cache append, attention.
struct GqaShape {
  int64_t heads, kv_heads, head_dim, rotary_half, window;
  Rope rope;
  float scale, norm_eps, clip;  // clip 0 = none (olmoe's clip_qkv)
  Prefill prefill = Prefill::kF32;
};
struct GqaCall {
  const float* q;  // [T][heads * head_dim]
  const float* k;  // [T][kv_heads * head_dim]
  const float* v;
  const float* cos;  // [T][rotary_half]
  const float* sin;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  const float* sinks;
  float* k_cache;  // [kv_heads][context][head_dim]
  float* v_cache;
  int64_t context, position, rows;
  float* out;  // [T][heads * head_dim]
  float* scratch;
};
// Floats. gqa and mla return the name of what ran: of a `Tiles`, or "rows".
int64_t gqa_scratch(const GqaShape& shape, int threads, int64_t max_rows);
const char* gqa(const Table& table, const Parallel& parallel, const GqaShape& shape, const GqaCall& call);

// Multi-head latent attention over the compressed cache, queries multiplied into the latent space.
struct MlaShape {
  int64_t heads, nope, rope_dim, v_dim, rank;
  Rope rope;
  float scale, norm_eps;
  Prefill prefill = Prefill::kF32;
};
struct MlaCall {
  const float* q;    // [T][heads * (nope + rope_dim)]
  const float* kv;   // [T][rank + rope_dim], as kv_a_proj_with_mqa gives it
  const float* cos;  // [T][rope_dim / 2]
  const float* sin;
  const float* kv_norm;  // [rank]
  Matrix kv_b;           // [heads * (nope + v_dim)][rank]
  float* cache;          // [context][rank + rope_dim]
  int64_t position, rows;
  float* out;  // [T][heads * v_dim]
  float* scratch;
};
int64_t mla_scratch(const MlaShape& shape, int threads, int64_t max_rows);
const char* mla(const Table& table, const Parallel& parallel, const MlaShape& shape, const MlaCall& call);

}  // namespace ktc::ops
