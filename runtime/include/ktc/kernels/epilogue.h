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

/* Half a block: columns 32b + 16 half and on. */
template <class V>
KTC_INLINE typename V::F add_bias(const ktc_gemm_args& a, int64_t b, int half, typename V::F y) {
  return a.weight.bias ? V::add(y, V::load(a.weight.bias + b * kBlockRows + 16 * half)) : y;
}

/* Raises a row's known max |h| if one of h is above it. Mostly it is there already: one compare, no
 * reduction. */
template <class V>
KTC_INLINE void see_amax(float* amax, typename V::F h) {
  const typename V::I size = V::iand(V::bits(h), V::iset1(0x7fffffff));
  const int32_t known = __atomic_load_n(reinterpret_cast<const int32_t*>(amax), __ATOMIC_RELAXED);
  if (V::iany_above(size, known)) raise_amax(amax, V::imax_lane(size));
}

/* Result of a GATED epilogue for activation row m and block b. */
template <class V>
KTC_INLINE void put_gated(const ktc_gemm_args& a, int64_t m, int64_t b, typename V::F h) {
  const int64_t n = 16 * b, columns = a.n_out - n;
  if (columns <= 0) return;
  float* out = a.out + m * a.ld_out + n;
  store_columns<V>(out, h, columns);
  if (a.row_amax) see_amax<V>(a.row_amax + m, columns < 16 ? V::load_n(out, int(columns)) : h);
}

/* Half a block of the other epilogues. */
template <class V>
KTC_INLINE void put_half(const ktc_gemm_args& a, int epilogue, int64_t m, int64_t b, int half,
                         typename V::F y) {
  const int64_t n = kBlockRows * b + 16 * half, columns = a.n_out - n;
  if (epilogue == KTC_SCATTER_ADD) {
    float* out = a.out + a.row_index[m] * a.ld_out + n;
    add_columns<V>(out, V::mul(V::set1(a.row_weight[m]), y), columns);
  } else {
    store_columns<V>(a.out + m * a.ld_out + n, y, columns);
  }
}

/* y0, y1: rows 32b..32b+15 and 32b+16..32b+31 of the product for activation row m, scaled, no bias. */
template <class V>
KTC_INLINE void emit(const ktc_gemm_args& a, int epilogue, int64_t m, int64_t b, typename V::F y0,
                     typename V::F y1) {
  y0 = add_bias<V>(a, b, 0, y0);
  y1 = add_bias<V>(a, b, 1, y1);
  if (is_gated(epilogue)) {
    Gating<V> gating;
    gating.gate = y0;
    gating.up = y1;
    gating.split(epilogue, a.act_alpha, a.act_limit);
    gating.power();
    gating.join();
    put_gated<V>(a, m, b, gating.gate);
  } else {
    put_half<V>(a, epilogue, m, b, 0, y0);
    put_half<V>(a, epilogue, m, b, 1, y1);
  }
}

/* Integer accumulators over the whole of K (channel scales, multipliers). comp = offset * sum of x. */
template <class V>
KTC_INLINE typename V::F scale_int(typename V::I acc, typename V::I comp, typename V::F row_scale,
                                   const float* weight_scale) {
  return V::mul(V::to_float(V::isub(acc, comp)), V::mul(row_scale, V::load(weight_scale)));
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
  const typename V::I comp = V::iset1(S::kOffset * a.act.sums[m]);
  const typename V::F row = V::set1(a.act.scale[m]);
  const float* scale = a.weight.scale + b * kBlockRows;
  emit<V>(a, epilogue, m, b, scale_int<V>(acc0, comp, row, scale), scale_int<V>(acc1, comp, row, scale + 16));
}
template <class S, class V>
KTC_NOINLINE void finish_float(const ktc_gemm_args& a, int epilogue, int64_t m, int64_t b, typename V::F y0,
                               typename V::F y1) {
  if (S::kGroupScale) { /* sums over groups carry the weights' scales already */
    const typename V::F row = V::set1(a.act.scale[m]);
    y0 = V::mul(y0, row);
    y1 = V::mul(y1, row);
  }
  emit<V>(a, epilogue, m, b, y0, y1);
}

}  // namespace ktc
#endif  // KTC_KERNELS_EPILOGUE_H
