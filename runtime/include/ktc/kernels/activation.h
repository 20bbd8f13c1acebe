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

/* e^x for x clamped to [-86, 88]; a NaN stays a NaN (operand order of min/max matters). */
template <class V>
KTC_INLINE typename V::F exp(typename V::F x) {
  using F = typename V::F;
  x = V::max(V::set1(-86.0f), x);
  x = V::min(V::set1(88.0f), x);
  /* x = n ln2 + r: the magic number leaves n in the low bits of the mantissa. */
  const F magic = V::set1(12582912.0f);
  const F t = V::fma(x, V::set1(1.44269504f), magic);
  const F n = V::sub(t, magic);
  F r = V::fma(n, V::set1(-0.693359375f), x);
  r = V::fma(n, V::set1(2.12194440e-4f), r);
  F p = V::set1(1.3981999507e-3f);
  p = V::fma(p, r, V::set1(8.3334519073e-3f));
  p = V::fma(p, r, V::set1(4.1665795894e-2f));
  p = V::fma(p, r, V::set1(1.6666665459e-1f));
  p = V::fma(p, r, V::set1(5.0000001201e-1f));
  p = V::fma(V::mul(p, r), r, V::add(r, V::set1(1.0f)));
  return V::from_bits(V::iadd(V::bits(p), V::template shl<23>(V::bits(t))));
}

/* x * sigmoid(beta * x) */
template <class V>
KTC_INLINE typename V::F swish(typename V::F x, typename V::F beta_x) {
  return V::div(x, V::add(V::set1(1.0f), exp<V>(V::sub(V::zero(), beta_x))));
}

/* gate, up -> h by a GATED epilogue of abi.h. */
template <class V>
KTC_INLINE typename V::F combine(int epilogue, typename V::F gate, typename V::F up, float alpha,
                                 float limit) {
  using F = typename V::F;
  if (epilogue != KTC_SILU_MUL) {
    const F top = V::set1(limit);
    gate = V::min(top, gate);
    up = V::max(V::set1(-limit), V::min(top, up));
  }
  if (epilogue == KTC_SWIGLU_OAI) {
    return V::mul(V::add(up, V::set1(1.0f)), swish<V>(gate, V::mul(V::set1(alpha), gate)));
  }
  return V::mul(swish<V>(gate, gate), up);
}

}  // namespace ktc
#endif  // KTC_KERNELS_ACTIVATION_H
