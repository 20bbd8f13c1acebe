// Attention by tiles in bf16, on AVX-512 BF16 and on AMX; the -m flags are CMake's.
#include "ops/tiles.h"
#include "ops/vec.h"

using namespace ktc::ops;

#include "ops/tiles.inc"
#include "ops/tiles_products.inc"
// (the arithmetic uses both)
#include "ops/tiles_bf16.inc"

namespace ktc::ops {

extern const Tiles kTiles_avx512_bf16, kTiles_amx;

template <typename Product>
static constexpr Tiles bf16_tiles(const char* name) {
  return {name,
          true,
          1.44269504f,
          bf16_pack_queries,
          bf16_begin,
          bf16_pack_keys,
          bf16_pack_weights,
          bf16_pack_latents,
          bf16_expand<Product>,
          bf16_attend<Product>,
          bf16_finish};
}

constexpr Tiles kTiles_avx512_bf16 = bf16_tiles<Avx512Product>("avx512_bf16");
constexpr Tiles kTiles_amx = bf16_tiles<AmxProduct>("amx");

}  // namespace ktc::ops
