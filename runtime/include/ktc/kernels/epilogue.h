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

/* y0, y1: rows 32b..32b+15 and 32b+16..32b+31 of the product for activation rows m..m+N, scaled, no bias.
 * `past`: STORE may go past the caches (the caller has checked alignment, and fences). */
template <class V, int N>
KTC_INLINE void emit(const ktc_gemm_args& a, int epilogue, int64_t m, int64_t b, Vectors<V, N>& y0,
                     Vectors<V, N>& y1, bool past = false) {
  using F = typename V::F;
  if (a.weight.bias) {
    const F b0 = V::load(a.weight.bias + b * kBlockRows), b1 = V::load(a.weight.bias + b * kBlockRows + 16);
    KTC_EACH(N, y0.v[i] = V::add(y0.v[i], b0));
    KTC_EACH(N, y1.v[i] = V::add(y1.v[i], b1));
  }
  if (is_gated(epilogue)) {
    const int64_t n = 16 * b, columns = a.n_out - n;
    if (columns <= 0) return;
    float* out = a.out + m * a.ld_out + n;
    combine<V, N>(epilogue, y0, y1, a.act_alpha, a.act_limit);
    KTC_EACH(N, store_columns<V>(out + i * a.ld_out, y0.v[i], columns));
    if (!a.row_amax) return;
    for (int i = 0; i < N; ++i) {
      typename V::I size = V::iand(V::bits(y0.v[i]), V::iset1(0x7fffffff));
      if (columns < 16) {
        const F seen = V::load_n(out + i * a.ld_out, int(columns));
        size = V::iand(V::bits(seen), V::iset1(0x7fffffff));
      }
      /* Mostly the maximum is there already: one compare, no reduction. */
      float* amax = a.row_amax + m + i;
      const int32_t known = __atomic_load_n(reinterpret_cast<const int32_t*>(amax), __ATOMIC_RELAXED);
      if (V::iany_above(size, known)) raise_amax(amax, V::imax_lane(size));
    }
    return;
  }
  const int64_t n = kBlockRows * b, columns = a.n_out - n;
  if (epilogue == KTC_SCATTER_ADD) {
    for (int i = 0; i < N; ++i) { /* in order: rows may share an output row */
      float* out = a.out + a.row_index[m + i] * a.ld_out + n;
      const F w = V::set1(a.row_weight[m + i]);
      add_columns<V>(out, V::mul(w, y0.v[i]), columns);
      add_columns<V>(out + 16, V::mul(w, y1.v[i]), columns - 16);
    }
  } else {
    float* out = a.out + m * a.ld_out + n;
    if (past && columns >= kBlockRows) {
      KTC_EACH(N, V::store_past(out + i * a.ld_out, y0.v[i]));
      KTC_EACH(N, V::store_past(out + i * a.ld_out + 16, y1.v[i]));
      return;
    }
    KTC_EACH(N, store_columns<V>(out + i * a.ld_out, y0.v[i], columns));
    KTC_EACH(N, store_columns<V>(out + i * a.ld_out + 16, y1.v[i], columns - 16));
  }
}

/* Integer accumulators over the whole of K (channel scales, multipliers). */
template <class S, class V, int N>
KTC_INLINE void emit_int(const ktc_gemm_args& a, int epilogue, int64_t m, int64_t b,
                         const typename V::I (&acc0)[N], const typename V::I (&acc1)[N], bool past = false) {
  using F = typename V::F;
  const F s0 = V::load(a.weight.scale + b * kBlockRows), s1 = V::load(a.weight.scale + b * kBlockRows + 16);
  typename V::I comp[N];
  F row[N];
  Vectors<V, N> y0, y1;
  KTC_EACH(N, comp[i] = V::iset1(S::kOffset * a.act.sums[m + i]));
  KTC_EACH(N, row[i] = V::set1(a.act.scale[m + i]));
  KTC_EACH(N, y0.v[i] = V::mul(V::to_float(V::isub(acc0[i], comp[i])), V::mul(row[i], s0)));
  KTC_EACH(N, y1.v[i] = V::mul(V::to_float(V::isub(acc1[i], comp[i])), V::mul(row[i], s1)));
  emit<V, N>(a, epilogue, m, b, y0, y1, past);
}

/* Sums over groups that carry the weight scales already. */
template <class S, class V, int N>
KTC_INLINE void emit_grouped(const ktc_gemm_args& a, int epilogue, int64_t m, int64_t b, Vectors<V, N>& sum0,
                             Vectors<V, N>& sum1, bool past = false) {
  for (int i = 0; i < N; ++i) {
    const typename V::F row = V::set1(a.act.scale[m + i]);
    sum0.v[i] = V::mul(sum0.v[i], row);
    sum1.v[i] = V::mul(sum1.v[i], row);
  }
  emit<V, N>(a, epilogue, m, b, sum0, sum1, past);
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
  emit_int<S, V, 1>(a, epilogue, m, b, {acc0}, {acc1});
}
template <class S, class V>
KTC_NOINLINE void finish_float(const ktc_gemm_args& a, int epilogue, int64_t m, int64_t b, typename V::F y0,
                               typename V::F y1) {
  Vectors<V, 1> v0{{y0}}, v1{{y1}};
  if constexpr (S::kGroupScale) {
    emit_grouped<S, V, 1>(a, epilogue, m, b, v0, v1);
  } else {
    emit<V, 1>(a, epilogue, m, b, v0, v1);
  }
}

}  // namespace ktc
#endif  // KTC_KERNELS_EPILOGUE_H
