/* Entries of the kernel table for the vector kernels. What a template instantiates. */
#ifndef KTC_KERNELS_VECTOR_ENTRY_H
#define KTC_KERNELS_VECTOR_ENTRY_H

#include "ktc/kernels/gemm_float.h"
#include "ktc/kernels/gemm_int.h"
#include "ktc/kernels/gemm_wide.h"
#include "ktc/kernels/quantize.h"

namespace ktc {

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
  if constexpr (S::kInteger) {
    gemm_int<S, V>(*args, Epilogue);
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
                         is_wide<S, V>() ? wide_scratch_bytes<S>() : vector_scratch_bytes<S>(),
                         &vector_gemm<S, V, Epilogue>,
                         &quantize<S, V>,
                         name};
}

}  // namespace ktc
#endif  // KTC_KERNELS_VECTOR_ENTRY_H
