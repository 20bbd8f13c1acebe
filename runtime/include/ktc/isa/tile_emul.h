/* The tile operations of isa/amx.h in portable C++, so that the AMX algorithm runs and is tested anywhere.
 *
 * Registers are part of the object (a kernel makes one per call). Integer results are exactly those of AMX;
 * bf16 sums differ in order. Rows and bytes outside the configured shape are zero, as in hardware.
 */
#ifndef KTC_ISA_TILE_EMUL_H
#define KTC_ISA_TILE_EMUL_H

#include "ktc/isa/scalar.h"

namespace ktc {
namespace isa {

struct EmulatedTiles {
  alignas(64) uint8_t reg[8][kTile];
  int64_t run = 64;

  static int thread_init() { return KTC_OK; }
  static int thread_fini() { return KTC_OK; }

  void configure(int run_bytes) {
    run = run_bytes;
    memset(reg, 0, sizeof reg); /* ldtilecfg zeroes all tiles */
  }
  KTC_INLINE int64_t rows(int t) const { return t >= 6 ? run / 4 : 16; }
  KTC_INLINE int64_t row_bytes(int t) const { return t == 4 || t == 5 ? run : 64; }

  template <int T>
  void zero() {
    memset(reg[T], 0, kTile);
  }
  template <int T>
  void load(const void* p, int64_t stride = 64) {
    memset(reg[T], 0, kTile);
    for (int64_t r = 0; r < rows(T); ++r) {
      memcpy(reg[T] + r * kRowBytes, static_cast<const uint8_t*>(p) + r * stride, size_t(row_bytes(T)));
    }
  }
  template <int T>
  void load_stream(const void* p, int64_t stride = 64) {
    load<T>(p, stride);
  }
  template <int T>
  void store(void* p, int64_t stride = 64) {
    for (int64_t r = 0; r < rows(T); ++r) {
      memcpy(static_cast<uint8_t*>(p) + r * stride, reg[T] + r * kRowBytes, size_t(row_bytes(T)));
    }
  }
  template <int C, int A, int B>
  KTC_NOINLINE void dot_su() {
    for (int64_t m = 0; m < 16; ++m) {
      Scalar::I acc = Scalar::iload(reinterpret_cast<const int32_t*>(reg[C] + m * kRowBytes));
      for (int64_t r = 0; r < run / 4; ++r) {
        const Scalar::I x = Scalar::iset1(load_i32(reg[A] + m * kRowBytes + 4 * r));
        acc = Scalar::dot(acc, Scalar::bload(reg[B] + r * kRowBytes), x);
      }
      memcpy(reg[C] + m * kRowBytes, &acc, sizeof acc);
    }
  }
  template <int C, int A, int B>
  KTC_NOINLINE void dot_bf16() {
    for (int64_t m = 0; m < 16; ++m) {
      Scalar::F acc = Scalar::load(reinterpret_cast<const float*>(reg[C] + m * kRowBytes));
      for (int64_t r = 0; r < run / 4; ++r) {
        const Scalar::B x = Scalar::B(Scalar::iset1(load_i32(reg[A] + m * kRowBytes + 4 * r)));
        const Scalar::B w = Scalar::bload(reg[B] + r * kRowBytes);
        acc = Scalar::fma_exact(Scalar::bf16_even(w), Scalar::bf16_even(x), acc);
        acc = Scalar::fma_exact(Scalar::bf16_odd(w), Scalar::bf16_odd(x), acc);
      }
      memcpy(reg[C] + m * kRowBytes, &acc, sizeof acc);
    }
  }
};

}  // namespace isa
}  // namespace ktc
#endif  // KTC_ISA_TILE_EMUL_H
