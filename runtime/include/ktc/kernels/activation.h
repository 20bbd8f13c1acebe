/* The activation functions between gate/up and down, on 16 lanes.
 *
 * exp is a polynomial of our own made of single-rounded operations (fused ones included) in a fixed order,
 * so that every instruction set gives the same bits; no libm. Relative error of exp below 2e-7
 * (tests/kernels).
 */
#ifndef KTC_KERNELS_ACTIVATION_H
#define KTC_KERNELS_ACTIVATION_H

#include "ktc/kernels/common.h"

namespace ktc {

/* Several vectors at once, one operation on all of them after the other: each waits for nothing, where a
 * single one would be a chain as long as the scheduler is deep (side_work.h runs beside tile products). */
template <class V, int N>
struct Vectors {
  typename V::F v[N];
};

/* for every i < N, unrolled; `body` uses i */
#define KTC_EACH(N, body) _Pragma("GCC unroll 8") for (int i = 0; i < (N); ++i) body

/* e^x for x clamped to [-86, 88]; a NaN stays a NaN (operand order of min/max matters). */
template <class V, int N>
KTC_INLINE void exp(Vectors<V, N>& x) {
  using F = typename V::F;
  F t[N], n[N], r[N], p[N];
  /* x = n ln2 + r: the magic number leaves n in the low bits of the mantissa. */
  const F magic = V::set1(12582912.0f);
  KTC_EACH(N, x.v[i] = V::max(V::set1(-86.0f), x.v[i]));
  KTC_EACH(N, x.v[i] = V::min(V::set1(88.0f), x.v[i]));
  KTC_EACH(N, t[i] = V::fma(x.v[i], V::set1(1.44269504f), magic));
  KTC_EACH(N, n[i] = V::sub(t[i], magic));
  KTC_EACH(N, r[i] = V::fma(n[i], V::set1(-0.693359375f), x.v[i]));
  KTC_EACH(N, r[i] = V::fma(n[i], V::set1(2.12194440e-4f), r[i]));
  KTC_EACH(N, p[i] = V::fma(V::set1(1.3981999507e-3f), r[i], V::set1(8.3334519073e-3f)));
  KTC_EACH(N, p[i] = V::fma(p[i], r[i], V::set1(4.1665795894e-2f)));
  KTC_EACH(N, p[i] = V::fma(p[i], r[i], V::set1(1.6666665459e-1f)));
  KTC_EACH(N, p[i] = V::fma(p[i], r[i], V::set1(5.0000001201e-1f)));
  KTC_EACH(N, p[i] = V::fma(V::mul(p[i], r[i]), r[i], V::add(r[i], V::set1(1.0f))));
  KTC_EACH(N, x.v[i] = V::from_bits(V::iadd(V::bits(p[i]), V::template shl<23>(V::bits(t[i])))));
}

/* x *= sigmoid(beta_x) */
template <class V, int N>
KTC_INLINE void swish(Vectors<V, N>& x, Vectors<V, N>& beta_x) {
  KTC_EACH(N, beta_x.v[i] = V::sub(V::zero(), beta_x.v[i]));
  exp<V, N>(beta_x);
  KTC_EACH(N, beta_x.v[i] = V::add(V::set1(1.0f), beta_x.v[i]));
  KTC_EACH(N, x.v[i] = V::div(x.v[i], beta_x.v[i]));
}

/* gate, up -> h (in gate) by a GATED epilogue of abi.h. */
template <class V, int N>
KTC_INLINE void combine(int epilogue, Vectors<V, N>& gate, Vectors<V, N>& up, float alpha, float limit) {
  using F = typename V::F;
  if (epilogue != KTC_SILU_MUL) {
    const F top = V::set1(limit);
    KTC_EACH(N, gate.v[i] = V::min(top, gate.v[i]));
    KTC_EACH(N, up.v[i] = V::max(V::set1(-limit), V::min(top, up.v[i])));
  }
  Vectors<V, N> beta = gate;
  if (epilogue == KTC_SWIGLU_OAI) {
    KTC_EACH(N, beta.v[i] = V::mul(V::set1(alpha), gate.v[i]));
    KTC_EACH(N, up.v[i] = V::add(up.v[i], V::set1(1.0f)));
  }
  swish<V, N>(gate, beta);
  KTC_EACH(N, gate.v[i] = V::mul(gate.v[i], up.v[i]));
}

}  // namespace ktc
#endif  // KTC_KERNELS_ACTIVATION_H
