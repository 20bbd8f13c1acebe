/* AVX-512 with what is different on AMD's CPUs from Zen 4 on: BF16 dot products at twice the rate of FMA (on
 * Intel's they take twice as long as FMA), and weights called in order.
 */
#ifndef KTC_ISA_ZEN4_H
#define KTC_ISA_ZEN4_H

#include "ktc/isa/avx512.h"

namespace ktc {
namespace isa {

struct Zen4 : Avx512 {
  static constexpr bool kWideFloat = false, kDotFloat = true, kPagesByTurns = false;

  using Avx512::dot;
  /* acc + odd product + even product of a pair, each sum rounded once; denormals count as zero. */
  static KTC_INLINE F dot(F acc, B w, I x) { return _mm512_dpbf16_ps(acc, __m512bh(w), __m512bh(x)); }
};

}  // namespace isa
}  // namespace ktc
#endif  // KTC_ISA_ZEN4_H
