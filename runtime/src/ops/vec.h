// Sixteen f32 lanes on any ISA, for the operator units only.
//
// Included by the per-ISA units after KTC_OPS_NS is set; everything has internal linkage, since a
// function compiled with wider -m flags must never be the linker's choice for code that runs elsewhere.
#pragma once

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#include <stdint.h>
#include <string.h>

namespace {

#if defined(__AVX512F__)
#define KTC_LANES 16
#elif defined(__AVX2__)
#define KTC_LANES 8
#else
#define KTC_LANES 4
#endif
constexpr int kLanes = KTC_LANES;
constexpr int kParts = 16 / kLanes;

typedef float NativeF __attribute__((vector_size(4 * KTC_LANES)));
typedef int32_t NativeI __attribute__((vector_size(4 * KTC_LANES)));
typedef uint32_t NativeU __attribute__((vector_size(4 * KTC_LANES)));
typedef uint16_t NativeH __attribute__((vector_size(2 * KTC_LANES)));

#define KTC_INLINE static inline __attribute__((always_inline))

struct F16x {  // 16 lanes
  NativeF p[kParts];
};

KTC_INLINE NativeF native_load(const float* x) {
  NativeF v;
  memcpy(&v, x, sizeof v);
  return v;
}
KTC_INLINE void native_store(float* x, NativeF v) { memcpy(x, &v, sizeof v); }
KTC_INLINE NativeF native_set(float x) {
#if defined(__AVX512F__)
  return (NativeF)_mm512_set1_ps(x);
#elif defined(__AVX2__)
  return (NativeF)_mm256_set1_ps(x);
#else
  return NativeF{x, x, x, x};
#endif
}

KTC_INLINE NativeF native_fma(NativeF a, NativeF b, NativeF c) {
#if defined(__AVX512F__)
  return (NativeF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (NativeF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

KTC_INLINE F16x load16(const float* x) {
  F16x v;
  for (int i = 0; i < kParts; ++i) v.p[i] = native_load(x + i * kLanes);
  return v;
}
KTC_INLINE void store16(float* x, const F16x& v) {
  for (int i = 0; i < kParts; ++i) native_store(x + i * kLanes, v.p[i]);
}
KTC_INLINE F16x set16(float x) {
  F16x v;
  for (int i = 0; i < kParts; ++i) v.p[i] = native_set(x);
  return v;
}
KTC_INLINE F16x zero16() { return set16(0.0f); }
// The first `count` < 16 elements, zeros after them; never reads past them.
KTC_INLINE F16x load16_tail(const float* x, int64_t count) {
  float t[16] = {0};
  for (int64_t i = 0; i < count; ++i) t[i] = x[i];
  return load16(t);
}
KTC_INLINE void store16_tail(float* x, const F16x& v, int64_t count) {
  float t[16];
  store16(t, v);
  for (int64_t i = 0; i < count; ++i) x[i] = t[i];
}
#define KTC_BINARY(name, expr)                         \
  KTC_INLINE F16x name(const F16x& a, const F16x& b) { \
    F16x r;                                            \
    for (int i = 0; i < kParts; ++i) {                 \
      const NativeF x = a.p[i], y = b.p[i];            \
      r.p[i] = expr;                                   \
    }                                                  \
    return r;                                          \
  }
KTC_BINARY(add, x + y)
KTC_BINARY(sub, x - y)
KTC_BINARY(mul, x* y)
KTC_BINARY(div, x / y)
#undef KTC_BINARY
KTC_INLINE F16x fma(const F16x& a, const F16x& b, const F16x& c) {
  F16x r;
  for (int i = 0; i < kParts; ++i) r.p[i] = native_fma(a.p[i], b.p[i], c.p[i]);
  return r;
}

// (((l + l+8) + l+4) + l+2) + l+1: one tree on every ISA.
#if KTC_LANES == 16
KTC_INLINE float sum16(const F16x& v) {
  NativeF x = v.p[0];
  x += __builtin_shuffle(x, (NativeI){8, 9, 10, 11, 12, 13, 14, 15, 8, 9, 10, 11, 12, 13, 14, 15});
  x += __builtin_shuffle(x, (NativeI){4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7, 4, 5, 6, 7});
  x += __builtin_shuffle(x, (NativeI){2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3});
  x += __builtin_shuffle(x, (NativeI){1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1});
  return x[0];
}
// Lane i of the result is sum16(v[i]): the tree is walked for all sixteen vectors at once.
KTC_INLINE NativeF sum16_each(const NativeF* v) {
  NativeF a[8], b[4], c[2];
  for (int i = 0; i < 8; ++i)  // [v(i) by 8 | v(i + 8) by 8]
    a[i] =
        __builtin_shuffle(v[i], v[i + 8], (NativeI){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}) +
        __builtin_shuffle(v[i], v[i + 8],
                          (NativeI){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
  for (int i = 0; i < 4; ++i)  // quarters: i, i + 4, i + 8, i + 12
    b[i] = __builtin_shuffle(a[i], a[i + 4],
                             (NativeI){0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27}) +
           __builtin_shuffle(a[i], a[i + 4],
                             (NativeI){4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31});
  for (int i = 0; i < 2; ++i)  // eighths: i, i + 2, ..., i + 14
    c[i] = __builtin_shuffle(b[i], b[i + 2],
                             (NativeI){0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29}) +
           __builtin_shuffle(b[i], b[i + 2],
                             (NativeI){2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31});
  return __builtin_shuffle(c[0], c[1], (NativeI){0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30}) +
         __builtin_shuffle(c[0], c[1], (NativeI){1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31});
}
#elif KTC_LANES == 8
KTC_INLINE float sum16(const F16x& v) {
  NativeF x = v.p[0] + v.p[1];
  x += __builtin_shuffle(x, (NativeI){4, 5, 6, 7, 4, 5, 6, 7});
  x += __builtin_shuffle(x, (NativeI){2, 3, 2, 3, 2, 3, 2, 3});
  x += __builtin_shuffle(x, (NativeI){1, 1, 1, 1, 1, 1, 1, 1});
  return x[0];
}
#else
KTC_INLINE float sum16(const F16x& v) {
  NativeF x = (v.p[0] + v.p[2]) + (v.p[1] + v.p[3]);
  x += __builtin_shuffle(x, (NativeI){2, 3, 2, 3});
  x += __builtin_shuffle(x, (NativeI){1, 1, 1, 1});
  return x[0];
}
#endif

KTC_INLINE NativeF bf16_to_native(const uint16_t* x) {
  NativeH h;
  memcpy(&h, x, sizeof h);
#if defined(__AVX512F__)
  return (NativeF)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)h), 16);
#elif defined(__AVX2__)
  return (NativeF)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)h), 16);
#else
  return (NativeF)(__builtin_convertvector(h, NativeU) << 16);
#endif
}
// fp16 through bit arithmetic: exact, also for subnormals.
KTC_INLINE NativeF fp16_to_native(const uint16_t* x) {
  NativeH h;
  memcpy(&h, x, sizeof h);
  const NativeU w = __builtin_convertvector(h, NativeU);
  const NativeU sign = (w & 0x8000u) << 16, mag = w & 0x7fffu;
  const NativeF small = __builtin_convertvector((NativeI)mag, NativeF) * 0x1p-24f;
  const NativeU normal = (mag << 13) + (112u << 23), special = (mag << 13) + (224u << 23);
  const NativeU is_small = (NativeU)(mag < 0x400u), is_special = (NativeU)(mag >= 0x7c00u);
  const NativeU bits =
      ((NativeU)small & is_small) | (special & is_special) | (normal & ~(is_small | is_special));
  return (NativeF)(sign | bits);
}

// Element access for the three storage types; Load::at(p) gives 16 f32 lanes.
struct LoadF32 {
  typedef float T;
  KTC_INLINE F16x at(const float* p) { return load16(p); }
  KTC_INLINE float one(const float* p) { return *p; }
};
struct LoadBF16 {
  typedef uint16_t T;
  KTC_INLINE F16x at(const uint16_t* p) {
    F16x v;
    for (int i = 0; i < kParts; ++i) v.p[i] = bf16_to_native(p + i * kLanes);
    return v;
  }
  KTC_INLINE float one(const uint16_t* p) {
    const uint32_t b = (uint32_t)*p << 16;
    float f;
    memcpy(&f, &b, 4);
    return f;
  }
};
struct LoadF16 {
  typedef uint16_t T;
  KTC_INLINE F16x at(const uint16_t* p) {
    F16x v;
    for (int i = 0; i < kParts; ++i) v.p[i] = fp16_to_native(p + i * kLanes);
    return v;
  }
  KTC_INLINE float one(const uint16_t* p) {
    uint16_t t[16] = {*p};
    const NativeF v = fp16_to_native(t);
    return v[0];
  }
};
template <class L>
KTC_INLINE F16x load_tail(const typename L::T* p, int64_t count) {
  float t[16] = {0};
  for (int64_t i = 0; i < count; ++i) t[i] = L::one(p + i);
  return load16(t);
}

// e^x to about 1 ulp: 2^n * p(r), r in [-ln2/2, ln2/2]. NaN stays NaN, below -87.3 is 0, above 88.7 inf.
KTC_INLINE NativeF native_exp(NativeF x) {
  const NativeF magic = native_set(12582912.0f);  // rounds to nearest even for |v| < 2^22
  const NativeI under = x < -87.33654f, over = x > 88.72283f;
  NativeF c = (NativeF)(((NativeI)x & ~under & ~over) | ((NativeI)native_set(0.0f) & (under | over)));
  const NativeF nf = (c * 1.44269504088896341f + magic) - magic;
  const NativeF r = (c - nf * 0.693359375f) - nf * -2.12194440e-4f;
  NativeF p = native_set(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = (p * r) * r + r + 1.0f;
  // n can be 128 near the top: scale in two halves so that neither factor overflows.
  const NativeI n = __builtin_convertvector(nf, NativeI), a = n >> 1;
  const NativeU b = (NativeU)n - (NativeU)a;
  p = p * (NativeF)(((NativeU)a + 127u) << 23);
  p = p * (NativeF)((b + 127u) << 23);
  const NativeI inf = NativeI{} + 0x7f800000;
  // A NaN makes garbage of n, but p is a NaN whatever it is multiplied with.
  return (NativeF)(((NativeI)p & ~under & ~over) | (inf & over));
}
KTC_INLINE F16x exp16(const F16x& x) {
  F16x r;
  for (int i = 0; i < kParts; ++i) r.p[i] = native_exp(x.p[i]);
  return r;
}
KTC_INLINE F16x sigmoid16(const F16x& x) {
  F16x r;
  for (int i = 0; i < kParts; ++i) {
    const NativeF one = native_set(1.0f);
    r.p[i] = one / (one + native_exp(-x.p[i]));
  }
  return r;
}

KTC_INLINE bool is_nan(float x) { return x != x; }

}  // namespace
