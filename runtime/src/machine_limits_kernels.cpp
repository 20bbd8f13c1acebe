// Inner loops of machine_limits.h. Instruction sets are enabled per function and never for the file: whatever
// the compiler emits beside these functions must run on any x86-64.
#include <immintrin.h>

#include <cstring>

#include "machine_limits.h"

namespace ktc {
namespace limits {
namespace {

constexpr int kTileSteps = 4;  // 4 tiles of 1 KB each: 16 KB, well inside L1

struct alignas(64) TileOperands {
  uint8_t bytes[kTileSteps][4][1024];
};

// Zeros would do for the clock, but not for the power: operands are small numbers in both formats.
// Made once per thread: the time of making them must not count.
const TileOperands& operands() {
  static thread_local TileOperands t;
  static thread_local bool made = false;
  if (!made) {
    uint32_t seed = 1;
    uint8_t* p = &t.bytes[0][0][0];
    for (size_t i = 0; i < sizeof t.bytes; ++i) {
      seed = seed * 1664525u + 1013904223u;
      p[i] = i % 2 ? 0x3c : uint8_t(seed >> 24);
    }
    made = true;
  }
  return t;
}

// Palette 1, all eight tiles of 16 rows x 64 bytes.
void configure_tiles() {
  alignas(64) uint8_t config[64] = {};
  config[0] = 1;
  for (int t = 0; t < 8; ++t) {
    const uint16_t row_bytes = 64;
    std::memcpy(config + 16 + 2 * t, &row_bytes, sizeof row_bytes);
    config[48 + t] = 16;
  }
  asm volatile("ldtilecfg %0" ::"m"(config) : "memory");
}

#define KTC_TILE_STEP(dot)                                                                                  \
  asm volatile(                                                                                             \
      "tileloadd (%0,%1,1), %%tmm4\n\ttileloadd 2048(%0,%1,1), %%tmm6\n\t"                                  \
      "tileloadd 1024(%0,%1,1), %%tmm5\n\ttileloadd 3072(%0,%1,1), %%tmm7\n\t" dot                          \
      " %%tmm6, %%tmm4, %%tmm0\n\t" dot " %%tmm6, %%tmm5, %%tmm1\n\t" dot " %%tmm7, %%tmm4, %%tmm2\n\t" dot \
      " %%tmm7, %%tmm5, %%tmm3" ::"r"(p),                                                                   \
      "r"(int64_t{64})                                                                                      \
      : "memory")

void zero_tiles() {
  asm volatile("tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3" ::);
}

}  // namespace

double amx_int8(int64_t steps) {
  const TileOperands& t = operands();
  configure_tiles();
  zero_tiles();
  for (int64_t i = 0; i < steps; ++i) {
    const uint8_t* p = t.bytes[i % kTileSteps][0];
    KTC_TILE_STEP("tdpbssd");
  }
  asm volatile("tilerelease" ::: "memory");
  return double(steps) * 4 * 2 * 16 * 16 * 64;
}

double amx_bf16(int64_t steps) {
  const TileOperands& t = operands();
  configure_tiles();
  zero_tiles();
  for (int64_t i = 0; i < steps; ++i) {
    const uint8_t* p = t.bytes[i % kTileSteps][0];
    KTC_TILE_STEP("tdpbf16ps");
  }
  asm volatile("tilerelease" ::: "memory");
  return double(steps) * 4 * 2 * 16 * 16 * 32;
}

#undef KTC_TILE_STEP

// Twelve independent accumulators hide the latency of two units.
#define KTC_FOR_12(op) op(0) op(1) op(2) op(3) op(4) op(5) op(6) op(7) op(8) op(9) op(10) op(11)

__attribute__((target("avx512f"))) double avx512_vnni(int64_t steps) {
  __m512i acc[12], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(5);
  for (auto& v : acc) v = _mm512_setzero_si512();
  for (int64_t i = 0; i < steps; ++i) {
#define KTC_STEP(r) asm volatile("vpdpbusd %1, %2, %0" : "+v"(acc[r]) : "v"(a), "v"(b));
    KTC_FOR_12(KTC_STEP)
#undef KTC_STEP
  }
  return double(steps) * 12 * 2 * 64;
}

__attribute__((target("avx512f"))) double avx512_bf16(int64_t steps) {
  __m512i acc[12], a = _mm512_set1_epi16(0x3c00), b = a;
  for (auto& v : acc) v = _mm512_setzero_si512();
  for (int64_t i = 0; i < steps; ++i) {
#define KTC_STEP(r) asm volatile("vdpbf16ps %1, %2, %0" : "+v"(acc[r]) : "v"(a), "v"(b));
    KTC_FOR_12(KTC_STEP)
#undef KTC_STEP
  }
  return double(steps) * 12 * 2 * 32;
}

__attribute__((target("avx512f"))) double avx512_fma(int64_t steps) {
  __m512 acc[12], a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.001f);
  for (auto& v : acc) v = _mm512_setzero_ps();
  for (int64_t i = 0; i < steps; ++i) {
#define KTC_STEP(r) asm volatile("vfmadd231ps %1, %2, %0" : "+v"(acc[r]) : "v"(a), "v"(b));
    KTC_FOR_12(KTC_STEP)
#undef KTC_STEP
  }
  return double(steps) * 12 * 2 * 16;
}

__attribute__((target("avx2,fma"))) double avx2_fma(int64_t steps) {
  __m256 acc[12], a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.001f);
  for (auto& v : acc) v = _mm256_setzero_ps();
  for (int64_t i = 0; i < steps; ++i) {
#define KTC_STEP(r) asm volatile("vfmadd231ps %1, %2, %0" : "+x"(acc[r]) : "x"(a), "x"(b));
    KTC_FOR_12(KTC_STEP)
#undef KTC_STEP
  }
  return double(steps) * 12 * 2 * 8;
}

#undef KTC_FOR_12

__attribute__((target("avx512f"))) uint64_t read_avx512(const uint8_t* data, int64_t n) {
  constexpr int kStreams = 4;
  const int64_t stride = n / kStreams;
  __m512i sum[kStreams];
  for (auto& v : sum) v = _mm512_setzero_si512();
  for (int64_t at = 0; at < stride; at += 256) {
    for (int s = 0; s < kStreams; ++s) {
      const uint8_t* p = data + s * stride + at;
      for (int line = 0; line < 4; ++line) {
        _mm_prefetch(reinterpret_cast<const char*>(p + line * 64 + 2048),
                     _MM_HINT_T0);  // past the end is harmless
        sum[s] = _mm512_xor_si512(sum[s], _mm512_load_si512(p + line * 64));
      }
    }
  }
  for (int s = 1; s < kStreams; ++s) sum[0] = _mm512_xor_si512(sum[0], sum[s]);
  alignas(64) uint64_t words[8];
  _mm512_store_si512(words, sum[0]);
  uint64_t all = 0;
  for (uint64_t w : words) all ^= w;
  return all;
}

uint64_t read_generic(const uint8_t* data, int64_t n) {
  constexpr int kStreams = 4;
  const int64_t stride = n / kStreams;
  uint64_t sum[kStreams] = {};
  for (int64_t at = 0; at < stride; at += 64) {
    for (int s = 0; s < kStreams; ++s) {
      uint64_t words[8];
      std::memcpy(words, data + s * stride + at, sizeof words);
      for (uint64_t w : words) sum[s] ^= w;
    }
  }
  return sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
}

}  // namespace limits
}  // namespace ktc
