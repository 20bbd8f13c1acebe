/* From the accumulators of one activation row and one 32-row block to the output (abi.h, ktc_epilogue).
 *
 * The order of operations is the same for every kernel, so integer formats give the same bits
 * whichever kernel computed the accumulator.
 */
#ifndef KTC_KERNELS_EPILOGUE_H
#define KTC_KERNELS_EPILOGUE_H

#include "ktc/kernels/activation.h"

namespace ktc {

/* Raise *p to the float with these bits (of |h| >= 0). As integers a NaN is above everything, so it
 * stays; an infinity becomes a NaN, because the row it came from has no scale. */
KTC_INLINE void raise_amax(float* p, int32_t bits) {
  if (bits >= 0x7f800000) bits = 0x7fc00000;
  int32_t* target = reinterpret_cast<int32_t*>(p);
  int32_t seen = __atomic_load_n(target, __ATOMIC_RELAXED);
  while (seen < bits &&
         !__atomic_compare_exchange_n(target, &seen, bits, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

template <class V>
KTC_INLINE void store_columns(float* p, typename V::F y, int64_t columns) {
  if (columns >= 16) {
    V::store(p, y);
  } else if (columns > 0) {
    V::store_n(p, y, int(columns));
  }
}

template <class V>
KTC_INLINE void add_columns(float* p, typename V::F y, int64_t columns) {
  if (columns >= 16) {
    V::store(p, V::add(V::load(p), y));
  } else if (columns > 0) {
    V::store_n(p, V::add(V::load_n(p, int(columns)), y), int(columns));
  }
}

/* y0, y1: rows 32b..32b+15 and 32b+16..32b+31 of the product for activation row m, scaled, no bias. */
template <class V>
KTC_INLINE void emit(const ktc_gemm_args& a, int epilogue, int64_t m, int64_t b, typename V::F y0,
                     typename V::F y1) {
  if (a.weight.bias) {
    y0 = V::add(y0, V::load(a.weight.bias + b * kBlockRows));
    y1 = V::add(y1, V::load(a.weight.bias + b * kBlockRows + 16));
  }
  if (is_gated(epilogue)) {
    const int64_t n = 16 * b, columns = a.n_out - n;
    if (columns <= 0) return;
    const typename V::F h = combine<V>(epilogue, y0, y1, a.act_alpha, a.act_limit);
    store_columns<V>(a.out + m * a.ld_out + n, h, columns);
    if (a.row_amax) {
      typename V::I size = V::iand(V::bits(h), V::iset1(0x7fffffff));
      if (columns < 16) {
        const typename V::F seen = V::load_n(a.out + m * a.ld_out + n, int(columns));
        size = V::iand(V::bits(seen), V::iset1(0x7fffffff));
      }
      /* Mostly the maximum is there already: one compare, no reduction. */
      const int32_t known =
          __atomic_load_n(reinterpret_cast<const int32_t*>(a.row_amax + m), __ATOMIC_RELAXED);
      if (V::iany_above(size, known)) raise_amax(a.row_amax + m, V::imax_lane(size));
    }
    return;
  }
  const int64_t n = kBlockRows * b, columns = a.n_out - n;
  if (epilogue == KTC_SCATTER_ADD) {
    float* out = a.out + a.row_index[m] * a.ld_out + n;
    const typename V::F w = V::set1(a.row_weight[m]);
    add_columns<V>(out, V::mul(w, y0), columns);
    add_columns<V>(out + 16, V::mul(w, y1), columns - 16);
  } else {
    float* out = a.out + m * a.ld_out + n;
    store_columns<V>(out, y0, columns);
    store_columns<V>(out + 16, y1, columns - 16);
  }
}

/* Integer accumulators over the whole of K (channel scales, multipliers). */
template <class S, class V>
KTC_INLINE void emit_int(const ktc_gemm_args& a, int epilogue, int64_t m, int64_t b, typename V::I acc0,
                         typename V::I acc1) {
  const typename V::I comp = V::iset1(S::kOffset * a.act.sums[m]);
  const typename V::F row = V::set1(a.act.scale[m]);
  const float* scale = a.weight.scale + b * kBlockRows;
  const typename V::F y0 = V::mul(V::to_float(V::isub(acc0, comp)), V::mul(row, V::load(scale)));
  const typename V::F y1 = V::mul(V::to_float(V::isub(acc1, comp)), V::mul(row, V::load(scale + 16)));
  emit<V>(a, epilogue, m, b, y0, y1);
}

/* Sums over groups that carry the weight scales already. */
template <class S, class V>
KTC_INLINE void emit_grouped(const ktc_gemm_args& a, int epilogue, int64_t m, int64_t b, typename V::F sum0,
                             typename V::F sum1) {
  const typename V::F row = V::set1(a.act.scale[m]);
  emit<V>(a, epilogue, m, b, V::mul(sum0, row), V::mul(sum1, row));
}

/* One group: sum + (acc - offset * sum of x) * scale[b][g]. */
template <class S, class V>
KTC_INLINE typename V::F add_group(const ktc_gemm_args& a, int64_t m, int64_t b, int64_t g, int64_t groups,
                                   int half, typename V::I acc, typename V::F sum) {
  const typename V::I comp = V::iset1(S::kOffset * a.act.sums[m * groups + g]);
  const typename V::F scale = V::load(a.weight.scale + (b * groups + g) * kBlockRows + 16 * half);
  return V::add(sum, V::mul(V::to_float(V::isub(acc, comp)), scale));
}

/* A row's end as a call, for kernels with many places that end rows: beside K products per output a call
 * costs nothing, and inlined the epilogues would be most of the library. */
template <class S, class V>
KTC_NOINLINE void finish_int(const ktc_gemm_args& a, int epilogue, int64_t m, int64_t b, typename V::I acc0,
                             typename V::I acc1) {
  emit_int<S, V>(a, epilogue, m, b, acc0, acc1);
}
template <class S, class V>
KTC_NOINLINE void finish_float(const ktc_gemm_args& a, int epilogue, int64_t m, int64_t b, typename V::F y0,
                               typename V::F y1) {
  if constexpr (S::kGroupScale) {
    emit_grouped<S, V>(a, epilogue, m, b, y0, y1);
  } else {
    emit<V>(a, epilogue, m, b, y0, y1);
  }
}

}  // namespace ktc
#endif  // KTC_KERNELS_EPILOGUE_H
