/* Activations f32 -> packed A tiles: a copy (fp32), a rounding (bf16), or symmetric s8 with a scale
 * per row and sums (integer formats). abi.h, ktc_quant_args.
 *
 * Rows never influence each other: a row with a NaN or infinity gets scale NaN and zeros as values.
 */
#ifndef KTC_KERNELS_QUANTIZE_H
#define KTC_KERNELS_QUANTIZE_H

#include "ktc/kernels/common.h"

namespace ktc {

inline int check(const ktc_quant_args* a, bool integer) {
  if (!a || a->struct_size < sizeof(ktc_quant_args) || a->flags != 0) return KTC_ERR_ARGS;
  if (a->k <= 0 || a->k % 64 != 0 || a->k_valid < 0 || a->k_valid > a->k) return KTC_ERR_ARGS;
  if (a->m_begin < 0 || a->m_end < a->m_begin || a->copies < 1) return KTC_ERR_ARGS;
  if (a->m_begin == a->m_end) return KTC_OK;
  if (!a->x || !a->act.tiles || (integer && (!a->act.scale || !a->act.sums))) return KTC_ERR_ARGS;
  return KTC_OK;
}

/* Where the copies of source row m go. */
struct Destinations {
  const int64_t* list;
  int64_t first, count;
  KTC_INLINE int64_t operator[](int64_t i) const { return list ? list[first + i] : first + i; }
  KTC_INLINE int64_t any() const {
    for (int64_t i = 0; i < count; ++i) {
      if ((*this)[i] >= 0) return (*this)[i];
    }
    return -1;
  }
};

template <class V>
KTC_INLINE typename V::F load_columns(const float* x, int64_t k, int64_t k_valid) {
  if (k + 16 <= k_valid) return V::load(x + k);
  return k < k_valid ? V::load_n(x + k, int(k_valid - k)) : V::zero();
}

/* Bits of max |x|; above those of every finite float if the row holds a NaN or an infinity. */
template <class V>
inline int32_t row_amax_bits(const float* x, int64_t k_valid) {
  typename V::I top = V::izero();
  const typename V::I abs = V::iset1(0x7fffffff);
  for (int64_t k = 0; k < k_valid; k += 16) {
    top = V::imax(top, V::iand(V::bits(load_columns<V>(x, k, k_valid)), abs));
  }
  return V::imax_lane(top);
}

/* Where step s of a row is to be made: in its one place, or in `line` to be copied by put_step. Reading a
 * line back just after it was stored in parts would wait for the stores. */
KTC_INLINE uint8_t* step_place(const ktc_quant_args& a, const Destinations& to, int64_t steps, int64_t s,
                               uint8_t* line) {
  if (to.count != 1) return line;
  return const_cast<uint8_t*>(act_row(a.act, to[0], steps)) + s * kTile;
}

KTC_INLINE void put_step(const ktc_quant_args& a, const Destinations& to, int64_t steps, int64_t s,
                         const uint8_t* line) {
  if (to.count == 1) return;
  for (int64_t i = 0; i < to.count; ++i) {
    const int64_t row = to[i];
    if (row < 0) continue;
    memcpy(const_cast<uint8_t*>(act_row(a.act, row, steps)) + s * kTile, line, kRowBytes);
  }
}

/* Round to bf16, nearest even; a NaN stays a (quiet) NaN. Result in the low 16 bits of each lane. */
template <class V>
KTC_INLINE typename V::I to_bf16(typename V::F x) {
  using I = typename V::I;
  const I u = V::bits(x);
  const I odd = V::iand(V::template shr<16>(u), V::iset1(1));
  const I rounded = V::template shr<16>(V::iadd(V::iadd(u, V::iset1(0x7fff)), odd));
  const I quiet = V::ior(V::template shr<16>(u), V::iset1(0x40));
  return V::select_nan(x, quiet, rounded);
}

template <class S, class V>
inline void convert_row(const ktc_quant_args& a, const Destinations& to, const float* x) {
  const int64_t steps = S::steps(a.k);
  alignas(64) uint8_t line[kRowBytes];
  for (int64_t s = 0; s < steps; ++s) {
    uint8_t* const at = step_place(a, to, steps, s, line);
    if (S::kFormat == KTC_FP32) {
      V::store(reinterpret_cast<float*>(at), load_columns<V>(x, 16 * s, a.k_valid));
    } else {
      V::store_low16(at, to_bf16<V>(load_columns<V>(x, 32 * s, a.k_valid)));
      V::store_low16(at + 32, to_bf16<V>(load_columns<V>(x, 32 * s + 16, a.k_valid)));
    }
    put_step(a, to, steps, s, line);
  }
}

template <class S, class V>
inline void quantize_row(const ktc_quant_args& a, const Destinations& to, const float* x, int64_t any) {
  using F = typename V::F;
  using I = typename V::I;
  int32_t amax_bits;
  float amax, scale = 0.0f, inverse = 0.0f;
  if (a.amax) {
    memcpy(&amax_bits, a.amax + any, sizeof amax_bits);
    amax_bits &= 0x7fffffff;
  } else {
    amax_bits = row_amax_bits<V>(x, a.k_valid);
  }
  memcpy(&amax, &amax_bits, sizeof amax);
  bool finite = amax_bits < 0x7f800000;
  if (!finite) {
    const int32_t nan = 0x7fc00000;
    memcpy(&scale, &nan, sizeof scale);
  } else if (amax > 1e-36f) { /* below, 127 / amax overflows: such a row counts as zero */
    scale = amax / 127.0f;
    inverse = 127.0f / amax;
  }
  const bool live = inverse > 0.0f;
  const int64_t steps = S::steps(a.k), groups = S::sum_groups(a.k);
  const F lo = V::set1(-127.0f), hi = V::set1(127.0f), inv = V::set1(inverse);
  alignas(64) uint8_t line[kRowBytes];
  I sum = V::izero();
  for (int64_t s = 0; s < steps; ++s) {
    uint8_t* const at = step_place(a, to, steps, s, line);
    for (int64_t j = 0; j < 4; ++j) {
      const int64_t k = 64 * s + 16 * j;
      I q = V::izero();
      if (live) q = V::round(V::min(hi, V::max(lo, V::mul(load_columns<V>(x, k, a.k_valid), inv))));
      V::store_low8(at + 16 * j, q);
      sum = V::iadd(sum, q);
      const bool group_ends =
          k + 16 == a.k || (S::kGroupScale && (k + 16) % (S::kGroup ? S::kGroup : 1) == 0);
      if (group_ends) {
        const int64_t g = S::kGroupScale ? k / (S::kGroup ? S::kGroup : 1) : 0;
        const int32_t total = V::isum(sum);
        for (int64_t i = 0; i < to.count; ++i) {
          if (to[i] >= 0) a.act.sums[to[i] * groups + g] = total;
        }
        sum = V::izero();
      }
    }
    put_step(a, to, steps, s, line);
  }
  for (int64_t i = 0; i < to.count; ++i) {
    if (to[i] >= 0) a.act.scale[to[i]] = scale;
  }
}

/* The `quantize` entry of a kernel. */
template <class S, class V>
KTC_NOINLINE int quantize(const ktc_quant_args* args) {
  const int status = check(args, S::kInteger);
  if (status != KTC_OK) return status;
  const ktc_quant_args& a = *args;
  for (int64_t m = a.m_begin; m < a.m_end; ++m) {
    const Destinations to{a.dst_row, m * a.copies, a.copies};
    const int64_t any = to.any();
    if (any < 0) continue;
    const float* x = a.x + m * a.ld_x;
    if constexpr (S::kInteger) {
      quantize_row<S, V>(a, to, x, any);
    } else {
      convert_row<S, V>(a, to, x);
    }
  }
  return KTC_OK;
}

}  // namespace ktc
#endif  // KTC_KERNELS_QUANTIZE_H
