/* Entries of the kernel table for the vector kernels. What a template instantiates. */
#ifndef KTC_KERNELS_VECTOR_ENTRY_H
#define KTC_KERNELS_VECTOR_ENTRY_H

#include "ktc/kernels/gemm_chunks.h"
#include "ktc/kernels/gemm_dot.h"
#include "ktc/kernels/gemm_float.h"
#include "ktc/kernels/gemm_wide.h"
#include "ktc/kernels/quantize.h"

namespace ktc {

template <class S, class V>
constexpr int64_t scratch_bytes() {
  if constexpr (is_wide<S, V>()) {
    return wide_scratch_bytes<S, V>();
  } else if constexpr (is_chunked<S, V>()) {
    return kChunkScratchBytes;
  } else {
    return vector_scratch_bytes<S>();
  }
}

template <class S, class V, int Epilogue>
int vector_gemm(const ktc_gemm_args* args) {
  const int status = check<S>(args, Epilogue);
  if (status != KTC_OK) return status;
  if constexpr (is_wide<S, V>()) {
    if (args->scratch && S::k(args->k) <= kWideMaxK && args->m_end - args->m_begin >= wide_min_rows<S>()) {
      gemm_wide<Spec<S::kFormat, S::kScale, S::kGroup, 0>, V>(*args, Epilogue); /* one code for every K */
      return KTC_OK;
    }
  }
  if constexpr (is_chunked<S, V>()) {
    if (args->scratch && args->m_end - args->m_begin > V::kMostIntRows) {
      gemm_chunks<S, V>(*args, Epilogue);
      return KTC_OK;
    }
  }
  if constexpr (is_dot<S, V>()) {
    gemm_dot<S, V>(*args, Epilogue);
  } else {
    gemm_float<S, V>(*args, Epilogue);
  }
  return KTC_OK;
}

template <class S, class V, int Epilogue>
constexpr ktc_gemm_kernel vector_kernel(const char* name) {
  return ktc_gemm_kernel{sizeof(ktc_gemm_kernel),
                         S::kFormat,
                         S::kScale,
                         Epilogue,
                         int32_t(S::kGroup),
                         0,
                         S::kK,
                         scratch_bytes<S, V>(),
                         &vector_gemm<S, V, Epilogue>,
                         &quantize<S, V>,
                         name};
}

}  // namespace ktc
#endif  // KTC_KERNELS_VECTOR_ENTRY_H
