/* Entries of the kernel table for the tile kernels. What a template instantiates. */
#ifndef KTC_KERNELS_TILE_ENTRY_H
#define KTC_KERNELS_TILE_ENTRY_H

#include "ktc/kernels/gemm_tile.h"
#include "ktc/kernels/quantize.h"

namespace ktc {

/* Below this many rows the vector kernels of the same library are faster: measured with weights from DRAM
 * on one core with AMX and AVX-512 VNNI. A hint; the runtime may know better. */
template <class S>
constexpr int32_t tile_min_rows() {
  return S::kFormat == KTC_BF16 ? 3 : S::kFormat == KTC_INT8 ? 6 : 9;
}

template <class S, class V, class T, int Epilogue>
int tile_gemm(const ktc_gemm_args* args) {
  const int status = check<S>(args, Epilogue);
  if (status != KTC_OK) return status;
  if (args->m_begin == args->m_end || args->block_begin == args->block_end) return KTC_OK;
  if (!args->scratch) return KTC_ERR_ARGS;
  gemm_tile<S, V, T, Epilogue>(*args);
  return KTC_OK;
}

template <class S, class V, class T, int Epilogue>
constexpr ktc_gemm_kernel tile_kernel(const char* name) {
  return ktc_gemm_kernel{sizeof(ktc_gemm_kernel),
                         S::kFormat,
                         S::kScale,
                         Epilogue,
                         int32_t(S::kGroup),
                         tile_min_rows<S>(),
                         S::kK,
                         TileShape<S>::scratch_bytes(),
                         &tile_gemm<S, V, T, Epilogue>,
                         &quantize<S, V>,
                         name};
}

}  // namespace ktc
#endif  // KTC_KERNELS_TILE_ENTRY_H
