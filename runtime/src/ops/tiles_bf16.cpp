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

const Tiles kTiles_avx512_bf16 = {"avx512_bf16",
                                  true,
                                  1.44269504f,
                                  bf16_pack_queries,
                                  bf16_begin,
                                  bf16_pack_keys,
                                  bf16_pack_weights,
                                  bf16_pack_latents,
                                  bf16_expand<Avx512Product>,
                                  bf16_attend<Avx512Product>,
                                  bf16_finish};
const Tiles kTiles_amx = {"amx",
                          true,
                          1.44269504f,
                          bf16_pack_queries,
                          bf16_begin,
                          bf16_pack_keys,
                          bf16_pack_weights,
                          bf16_pack_latents,
                          bf16_expand<AmxProduct>,
                          bf16_attend<AmxProduct>,
                          bf16_finish};

}  // namespace ktc::ops
