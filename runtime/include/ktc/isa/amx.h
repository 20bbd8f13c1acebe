/* Tile operations of AMX (AMX-TILE, AMX-INT8, AMX-BF16), and the tile configuration of a thread.
 *
 * Registers: 0-3 accumulate (16 rows x 16 lanes of 4 bytes), 4-5 hold A (16 rows x run bytes), 6-7 hold
 * B (run / 4 rows x 64 bytes). A worker thread runs with run = 64; a kernel that needs shorter runs
 * configures them and restores 64 before it returns.
 *
 * Everything is inline assembly with memory clobbers: the compiler's own ldtilecfg intrinsic declares
 * only 8 of the 64 bytes it reads (g++ 12), so that at -O3 the stores before it may vanish.
 */
#ifndef KTC_ISA_AMX_H
#define KTC_ISA_AMX_H

#include <stdint.h>

#include "ktc/kernels/common.h"

namespace ktc {
namespace isa {

struct AmxTiles {
  static void configure(int run) {
    alignas(64) uint8_t config[64] = {};
    config[0] = 1; /* palette */
    for (int t = 0; t < 8; ++t) {
      const bool is_a = t == 4 || t == 5, is_b = t >= 6;
      const uint16_t row_bytes = uint16_t(is_a ? run : 64);
      memcpy(config + 16 + 2 * t, &row_bytes, sizeof row_bytes);
      config[48 + t] = uint8_t(is_b ? run / 4 : 16);
    }
    asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
  }
  static int thread_init() {
    configure(64);
    return KTC_OK;
  }
  static int thread_fini() {
    asm volatile("tilerelease" ::: "memory");
    return KTC_OK;
  }

  template <int T>
  KTC_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(T));
  }
  template <int T>
  KTC_INLINE void load(const void* p, int64_t stride = 64) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  /* The same, without displacing what L1 holds: for operands that stream past others that stay. */
  template <int T>
  KTC_INLINE void load_stream(const void* p, int64_t stride = 64) {
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  template <int T>
  KTC_INLINE void store(void* p, int64_t stride = 64) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(T) : "memory");
  }
  /* C += A (signed bytes) x B (unsigned bytes) */
  template <int C, int A, int B>
  KTC_INLINE void dot_su() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  template <int C, int A, int B>
  KTC_INLINE void dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

}  // namespace isa
}  // namespace ktc
#endif  // KTC_ISA_AMX_H
