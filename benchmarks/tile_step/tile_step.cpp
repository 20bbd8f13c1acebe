// What a step of the tile kernels is made of: the real kernels, with parts of their work cut out.
//
// The kernels are templates over an instruction set; these instruction sets leave operations out, so that the
// compiler drops what leads to them. What remains is timed in turns. Results are wrong, speed is right: the
// operands are real. Prints one JSON line per format, number of rows and source of the weights (from DRAM the
// whole kernel only).
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "ktc/isa/amx.h"
#include "ktc/isa/avx512.h"
#include "ktc/kernels/tile_entry.h"

namespace {

using ktc::isa::AmxTiles;
using ktc::isa::Avx512;

// Vectors without: unpacking int4, ending rows, calling later weights.
template <bool Unpacks, bool Ends, bool Calls>
struct Vectors : Avx512 {
  static KTC_INLINE void bstore(uint8_t* p, B a) {
    if (Unpacks) Avx512::bstore(p, a);
  }
  static KTC_INLINE void store(float* p, F a) {
    if (Ends) Avx512::store(p, a);
  }
  static KTC_INLINE void store_past(float* p, F a) {
    if (Ends) Avx512::store_past(p, a);
  }
  static KTC_INLINE bool iany_above(I a, int32_t bound) { return Ends && Avx512::iany_above(a, bound); }
  static KTC_INLINE void prefetch_write(const void* p) {
    if (Ends) Avx512::prefetch_write(p);
  }
  static KTC_INLINE void prefetch_l2(const uint8_t* p) {
    if (Calls) Avx512::prefetch_l2(p);
  }
};

// Tiles whose accumulators (0 to 3) are neither stored nor loaded between sweeps.
struct Kept : AmxTiles {
  template <int R>
  KTC_INLINE void store(void*) {}
  template <int R>
  KTC_INLINE void load(const void* p) {
    if (R >= 4) AmxTiles::load<R>(p);
  }
};

using Kernel = void (*)(const ktc_gemm_args&);
struct Variant {
  const char* name;
  Kernel run;
};

template <class S, int Epilogue>
std::vector<Variant> variants() {
  std::vector<Variant> list;
  list.push_back({"tiles", ktc::gemm_tile<S, Vectors<false, false, false>, Kept, Epilogue>});
  list.push_back({"+sums", ktc::gemm_tile<S, Vectors<false, false, false>, AmxTiles, Epilogue>});
  list.push_back({"+rows", ktc::gemm_tile<S, Vectors<false, true, false>, AmxTiles, Epilogue>});
  if (S::kFormat == KTC_INT4)
    list.push_back({"+unpack", ktc::gemm_tile<S, Vectors<true, true, false>, AmxTiles, Epilogue>});
  list.push_back({"all", ktc::gemm_tile<S, Vectors<true, true, true>, AmxTiles, Epilogue>});
  return list;
}

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return double(t.tv_sec) * 1e9 + double(t.tv_nsec);
}

// The clock right after a kernel: a chain of 20,000 dependent decrements takes a cycle each.
double gigahertz() {
  long n = 20000;
  const double start = now();
  asm volatile("1: dec %0\n\tjnz 1b" : "+r"(n));
  return 20000 / (now() - start);
}

double quantile(std::vector<double> v, double q) {
  std::sort(v.begin(), v.end());
  return v[size_t(double(v.size() - 1) * q)];
}

// Pseudo-random bytes in huge pages: AMX clocks lower on real operands than on zeros.
uint8_t* filled(size_t bytes) {
  bytes = (bytes + (2 << 20) - 1) >> 21 << 21;
  auto* p = static_cast<uint8_t*>(std::aligned_alloc(2 << 20, bytes));
  if (!p) std::exit(1);
  madvise(p, bytes, MADV_HUGEPAGE);
  uint32_t x = 12345;
  for (size_t i = 0; i < bytes; i += 4) {
    x ^= x << 13, x ^= x >> 17, x ^= x << 5;
    std::memcpy(p + i, &x, 4);
  }
  return p;
}

constexpr size_t kWeightBytes = size_t{384} << 20;
constexpr int64_t kMaxRows = 512;

struct Buffers {
  uint8_t* weights = filled(kWeightBytes);
  uint8_t* mult = filled(kWeightBytes / 8);
  float* x = reinterpret_cast<float*>(filled(kMaxRows * 8192 * 4));
  float* scale = reinterpret_cast<float*>(filled(1 << 20));
  uint8_t* act = filled(kMaxRows * 8192 * 2);
  float* act_scale = reinterpret_cast<float*>(filled(1 << 20));
  int32_t* act_sums = reinterpret_cast<int32_t*>(filled(1 << 20));
  float* amax = reinterpret_cast<float*>(filled(1 << 20));
  float* out = reinterpret_cast<float*>(filled(32 << 20));
  void* scratch = filled(8 << 20);
  Buffers() {
    for (int64_t i = 0; i < kMaxRows * 8192; ++i) {
      int32_t bits;
      std::memcpy(&bits, x + i, 4);
      x[i] = float(bits >> 8) * 1.2e-7f;
    }
    std::fill(scale, scale + (1 << 18), 1e-3f);
  }
};

template <class S, int Epilogue>
void measure(Buffers& buffers, const char* format, int64_t rows, bool from_dram, int rounds) {
  const int64_t k = S::kK, block_bytes = S::block_bytes(k);
  const int64_t blocks = from_dram ? 64 : std::max<int64_t>(2, (512 << 10) / block_bytes);
  const int64_t copies = from_dram ? int64_t(kWeightBytes) / (blocks * block_bytes) : 1;
  const int64_t calls = from_dram ? 2 : 8;
  ktc_quant_args quant{};
  quant.struct_size = sizeof quant;
  quant.k_valid = quant.k = quant.ld_x = k;
  quant.m_end = rows;
  quant.x = buffers.x;
  quant.copies = 1;
  quant.act = {buffers.act, buffers.act_scale, buffers.act_sums};
  ktc::quantize<S, Avx512>(&quant);
  std::vector<Variant> list = variants<S, Epilogue>();
  if (from_dram) list.erase(list.begin(), list.end() - 1);  // without calls the rest would be DRAM's latency
  std::vector<std::vector<double>> times(list.size()), clocks(list.size());
  int64_t copy = 0;
  for (int round = 0; round <= rounds; ++round) {
    for (size_t i = 0; i < list.size(); ++i) {
      const double start = now();
      for (int64_t c = 0; c < calls; ++c, copy = (copy + 1) % copies) {
        ktc_gemm_args args{};
        args.struct_size = sizeof args;
        args.k = k;
        args.m_end = rows;
        args.block_end = blocks;
        args.n_out = blocks * (ktc::is_gated(Epilogue) ? 16 : 32);
        args.act = quant.act;
        args.weight = {buffers.weights + copy * blocks * block_bytes, buffers.scale,
                       buffers.mult + copy * blocks * S::groups(k) * S::kMultBytes, nullptr};
        args.out = buffers.out;
        args.ld_out = (args.n_out / 16 | 1) * 16;
        args.row_amax = ktc::is_gated(Epilogue) ? buffers.amax : nullptr;
        args.scratch = buffers.scratch;
        list[i].run(args);
      }
      const double time = (now() - start) / double(calls * blocks * S::steps(k)) / (double(rows) / 32);
      if (round == 0) continue;
      times[i].push_back(time);
      clocks[i].push_back(gigahertz());
    }
  }
  std::printf("{\"format\": \"%s\", \"k\": %ld, \"rows\": %ld, \"weights\": \"%s\", \"parts\": {", format,
              long(k), long(rows), from_dram ? "DRAM" : "L2");
  for (size_t i = 0; i < list.size(); ++i)
    std::printf("%s\"%s\": [%.2f, %.2f]", i ? ", " : "", list[i].name, quantile(times[i], 0.5),
                quantile(clocks[i], 0.8));  // one that was interrupted is too low
  std::printf("}}\n");
  std::fflush(stdout);
}

using Int4Up = ktc::Spec<KTC_INT4, KTC_SCALE_CODEBOOK, 16, 2048>;
using Int4Down = ktc::Spec<KTC_INT4, KTC_SCALE_CODEBOOK, 16, 1408>;
using Int8Up = ktc::Spec<KTC_INT8, KTC_SCALE_CHANNEL, 0, 2048>;
using Int8Down = ktc::Spec<KTC_INT8, KTC_SCALE_CHANNEL, 0, 1408>;
using Bf16Up = ktc::Spec<KTC_BF16, KTC_SCALE_NONE, 0, 2048>;
using Bf16Down = ktc::Spec<KTC_BF16, KTC_SCALE_NONE, 0, 1408>;

}  // namespace

// tile_step ROUNDS ROWS...
int main(int argc, char** argv) {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) {
    std::fprintf(stderr, "the kernel does not permit AMX\n");
    return 1;
  }
  AmxTiles::thread_init();
  Buffers buffers;
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 21;
  for (int i = 2; i < argc; ++i) {
    const int64_t rows = std::min<int64_t>(kMaxRows, std::max(1, std::atoi(argv[i])));
    for (const bool from_dram : {false, true}) {
      measure<Int4Up, KTC_SILU_MUL>(buffers, "int4 gate+up", rows, from_dram, rounds);
      measure<Int4Down, KTC_STORE>(buffers, "int4 down", rows, from_dram, rounds);
      measure<Int8Up, KTC_SILU_MUL>(buffers, "int8 gate+up", rows, from_dram, rounds);
      measure<Int8Down, KTC_STORE>(buffers, "int8 down", rows, from_dram, rounds);
      measure<Bf16Up, KTC_SILU_MUL>(buffers, "bf16 gate+up", rows, from_dram, rounds);
      measure<Bf16Down, KTC_STORE>(buffers, "bf16 down", rows, from_dram, rounds);
    }
  }
}
