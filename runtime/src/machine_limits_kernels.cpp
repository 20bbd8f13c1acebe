// Inner loops of machine_limits.h. Instruction sets are enabled per function and never for the file: whatever
// the compiler emits beside these functions must run on any x86-64.
#include <immintrin.h>

#include <cstring>

#include "machine_limits.h"

namespace ktc {
namespace limits {
namespace {

// Zeros would do for the pipelines, but the clock is higher on them than on real work. This byte makes small
// numbers of every format: 60 as int8, 0.01 as bf16 and fp32.
constexpr uint8_t kOperand = 0x3c;
constexpr int kTileSteps = 4;  // 4 tiles of 1 KB each: 16 KB, well inside L1

struct alignas(64) TileOperands {
  uint8_t bytes[kTileSteps][4][1024];
};

// Made once per thread: the time of making them must not count.
const TileOperands& operands() {
  static thread_local TileOperands t;
  static thread_local bool made = false;
  if (!made) {
    uint32_t seed = 1;
    uint8_t* p = &t.bytes[0][0][0];
    for (size_t i = 0; i < sizeof t.bytes; ++i) {
      seed = seed * 1664525u + 1013904223u;
      p[i] = i % 2 ? kOperand : uint8_t(seed >> 24);
    }
    made = true;
  }
  return t;
}

// Palette 1, all eight tiles of 16 rows x 64 bytes; loading a configuration zeroes them.
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

}  // namespace

// A 2x2 product of tiles in the order of gemm_tile.h: a tile is loaded as late as its first product allows
// and is free after two, so that even a CPU that renames few tiles loads the next ones meanwhile.
#define KTC_TILE_STEP(at, dot)                                                                      \
  "tileloadd " #at "+2048(%0,%1,1), %%tmm6\n\ttileloadd " #at "(%0,%1,1), %%tmm4\n\ttileloadd " #at \
  "+3072(%0,%1,1), %%tmm7\n\t" dot " %%tmm6, %%tmm4, %%tmm0\n\t" dot                                \
  " %%tmm7, %%tmm4, %%tmm1\n\ttileloadd " #at "+1024(%0,%1,1), %%tmm5\n\t" dot                      \
  " %%tmm6, %%tmm5, %%tmm2\n\t" dot " %%tmm7, %%tmm5, %%tmm3\n\t"

// `k` products for each of 16x16 results. Rounds `steps` up to whole rounds over the operands.
#define KTC_TILE_PEAK(name, dot, k)                                                        \
  double name(int64_t steps) {                                                             \
    const TileOperands& t = operands();                                                    \
    configure_tiles();                                                                     \
    int64_t done = 0;                                                                      \
    for (; done < steps; done += kTileSteps) {                                             \
      asm volatile(KTC_TILE_STEP(0, dot) KTC_TILE_STEP(4096, dot) KTC_TILE_STEP(8192, dot) \
                       KTC_TILE_STEP(12288, dot)::"r"(t.bytes),                            \
                   "r"(int64_t{64})                                                        \
                   : "memory");                                                            \
    }                                                                                      \
    asm volatile("tilerelease" ::: "memory");                                              \
    return double(done) * 4 * 2 * 16 * 16 * (k);                                           \
  }

KTC_TILE_PEAK(amx_int8, "tdpbssd", 64)
KTC_TILE_PEAK(amx_bf16, "tdpbf16ps", 32)

#undef KTC_TILE_PEAK
#undef KTC_TILE_STEP

// Twelve independent accumulators hide the latency of two units; each step does `k` products in each.
#define KTC_VECTOR_PEAK(name, isa, Vector, dot, k)                              \
  __attribute__((target(isa))) double name(int64_t steps) {                     \
    Vector acc[12] = {};                                                        \
    const Vector x = Vector{} + kOperand * 0x0101010101010101LL;                \
    for (int64_t i = 0; i < steps; ++i) {                                       \
      for (Vector& v : acc) asm volatile(dot " %1, %1, %0" : "+v"(v) : "v"(x)); \
    }                                                                           \
    return double(steps) * 12 * 2 * (k);                                        \
  }

KTC_VECTOR_PEAK(avx512_vnni, "avx512f", __m512i, "vpdpbusd", 64)
KTC_VECTOR_PEAK(avx512_bf16, "avx512f", __m512i, "vdpbf16ps", 32)
KTC_VECTOR_PEAK(avx512_fma, "avx512f", __m512i, "vfmadd231ps", 16)
KTC_VECTOR_PEAK(avx_vnni, "avx2", __m256i, "%{vex%} vpdpbusd", 32)
KTC_VECTOR_PEAK(avx2_fma, "avx2,fma", __m256i, "vfmadd231ps", 8)

#undef KTC_VECTOR_PEAK

// Bytes without a dot product of their own: 16-bit pairs multiplied and added, then added to the sums.
__attribute__((target("avx2"))) double avx2_int8(int64_t steps) {
  __m256i acc[12] = {};
  const __m256i x = __m256i{} + kOperand * 0x0001000100010001LL;
  for (int64_t i = 0; i < steps; ++i) {
    for (__m256i& v : acc) {
      __m256i product;
      asm volatile("vpmaddwd %2, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(v), "=&x"(product) : "x"(x));
    }
  }
  return double(steps) * 12 * 2 * 16;
}

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

__attribute__((target("avx2"))) uint64_t read_avx2(const uint8_t* data, int64_t n) {
  constexpr int kStreams = 4;
  const int64_t stride = n / kStreams;
  __m256i sum[kStreams];
  for (auto& v : sum) v = _mm256_setzero_si256();
  for (int64_t at = 0; at < stride; at += 256) {
    for (int s = 0; s < kStreams; ++s) {
      const uint8_t* p = data + s * stride + at;
      for (int half = 0; half < 8; ++half) {
        // Past the end is harmless.
        if (half % 2 == 0) _mm_prefetch(reinterpret_cast<const char*>(p + half * 32 + 2048), _MM_HINT_T0);
        sum[s] = _mm256_xor_si256(sum[s], _mm256_load_si256(reinterpret_cast<const __m256i*>(p) + half));
      }
    }
  }
  for (int s = 1; s < kStreams; ++s) sum[0] = _mm256_xor_si256(sum[0], sum[s]);
  alignas(32) uint64_t words[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(words), sum[0]);
  return words[0] ^ words[1] ^ words[2] ^ words[3];
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
