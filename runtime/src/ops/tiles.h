// Attention of many query rows: tiles of 32 queries against blocks of 64 keys, with a running softmax.
//
// Everything is transposed: scores are [key][query], results [dv][query], so that a query is a lane of a
// vector, the softmax needs no sums across lanes, and the probabilities of two neighbouring keys are already
// the operand that bf16 products want. Scores of one tile and block exist at a time, whatever the context.
// One `Tiles` per instruction set and data type; the loops over heads, tiles and keys are prefill.cpp's.
#pragma once

#include <cstdint>

#include "ops/ops.h"

namespace ktc::ops {

constexpr int64_t kTileQueries = 32;
constexpr int64_t kTileKeys = 64;

// Bytes of what the functions of a `Tiles` read and write for one head.
struct TileSizes {
  int64_t query;             // a tile of queries
  int64_t state;             // a tile's results, maxima and sums
  int64_t key, value;        // a block of keys, of values
  int64_t weights, latents;  // MLA, if anything is packed: kv_b of a head; a block of the compressed cache
};
// rank and nope are 0 unless keys and values are expanded from a compressed cache.
TileSizes tile_sizes(bool bf16, int64_t dk, int64_t dv, int64_t rank, int64_t nope);

// A tile of queries against the keys [k_begin, k_end); k_begin is a multiple of kTileKeys from `keys`.
// Query pair p is row `first_pair + p`; its token is that / group and it sees keys up to position + token,
// no further back than window (0 = no limit).
struct TileArgs {
  const void* query;
  const void* keys;  // of k_begin; blocks lie `block_*` bytes apart
  const void* values;
  int64_t block_keys, block_values;
  int64_t ld_k, ld_v;  // floats between keys, where keys and values are f32
  const uint8_t* bad;  // [blocks] a value is not finite; null: not known
  int64_t dk, dv;
  int64_t pairs, first_pair, group, position, window;
  int64_t k_begin, k_end;
  void* state;
};

// Where a tile's results go: pair p of a KV head to out + token * ld_out + (p % group) * dv.
struct TileOut {
  float* out;
  int64_t ld_out, dv, pairs, first_pair, group;
};

// kv_b of one head, and one block of the compressed cache.
struct LatentArgs {
  Matrix key, value;  // rows of kv_b: [nope][rank], [dv][rank]
  const float* cache;
  int64_t ld, keys;  // rows of this block, at most kTileKeys
  int64_t rank, nope, rope, dv;
};

struct Tiles {
  const char* name;
  bool bf16;
  float log_scale;  // scores and sinks are multiplied with this: 1, or log2(e) where powers of two are taken
  // rows [pairs][dk] times `scale` -> a tile
  void (*pack_queries)(const float* rows, int64_t pairs, int64_t dk, float scale, void* query);
  // maxima [kTileQueries] (-inf, or the sinks), sums (0 or 1), results 0
  void (*begin)(const float* sinks, int64_t dv, void* state);
  // f32 [keys][dk], [keys][dv] -> blocks; true if a value is not finite. Null: blocks are read in place.
  bool (*pack_keys)(const float* k, int64_t ld_k, const float* v, int64_t ld_v, int64_t keys, int64_t dk,
                    int64_t dv, void* key, void* value);
  // MLA, each null where not needed: a head's weights; a block of latents; both -> blocks of keys and values.
  void (*pack_weights)(const LatentArgs&, void* weights);
  void (*pack_latents)(const LatentArgs&, void* latents);
  bool (*expand)(const LatentArgs&, const void* weights, const void* latents, void* key, void* value);
  void (*attend)(const TileArgs&);
  void (*finish)(const void* state, const TileOut&);
};

}  // namespace ktc::ops
