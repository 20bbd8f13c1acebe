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

/* gate, up -> h (in `gate`) by a GATED epilogue of abi.h, in three parts of about the same work: beside tile
 * products (side_work.h) one chain of dependent operations as long as the whole fills the scheduler. */
template <class V>
struct Gating {
  using F = typename V::F;
  F gate, up;
  F n, r; /* between the parts; in r first the remainder, then e^r */

  /* Limits, and the beginning of e^x for x = -gate (times alpha): x clamped to [-86, 88] = n ln2 + r. A NaN
   * stays a NaN (operand order of min/max matters). The magic number leaves n in the low bits of the
   * mantissa. */
  KTC_INLINE void split(int epilogue, float alpha, float limit) {
    if (epilogue != KTC_SILU_MUL) {
      const F top = V::set1(limit);
      gate = V::min(top, gate);
      up = V::max(V::set1(-limit), V::min(top, up));
    }
    F x = gate;
    if (epilogue == KTC_SWIGLU_OAI) {
      x = V::mul(V::set1(alpha), gate);
      up = V::add(up, V::set1(1.0f));
    }
    const F magic = V::set1(12582912.0f);
    x = V::min(V::set1(88.0f), V::max(V::set1(-86.0f), V::sub(V::zero(), x)));
    n = V::fma(x, V::set1(1.44269504f), magic);
    const F whole = V::sub(n, magic);
    r = V::fma(whole, V::set1(2.12194440e-4f), V::fma(whole, V::set1(-0.693359375f), x));
  }
  /* e^r by a polynomial. */
  KTC_INLINE void power() {
    F p = V::fma(V::set1(1.3981999507e-3f), r, V::set1(8.3334519073e-3f));
    p = V::fma(p, r, V::set1(4.1665795894e-2f));
    p = V::fma(p, r, V::set1(1.6666665459e-1f));
    p = V::fma(p, r, V::set1(5.0000001201e-1f));
    r = V::fma(V::mul(p, r), r, V::add(r, V::set1(1.0f)));
  }
  /* gate * sigmoid(-x) * up */
  KTC_INLINE void join() {
    const F e = V::from_bits(V::iadd(V::bits(r), V::template shl<23>(V::bits(n))));
    gate = V::mul(V::div(gate, V::add(V::set1(1.0f), e)), up);
  }
};

}  // namespace ktc
#endif  // KTC_KERNELS_ACTIVATION_H
