// A kernel library written from ktc/abi.h alone: naive, scalar, and obviously right.
//
// It is the oracle of the runtime's tests, and the proof that the header is enough to implement the ABI.
// It is not one of the shipped kernels (runtime/include/ktc/kernels, templates/), shares no code with them,
// and for the tests' sake has what they must not have: counters, and kernels that fail on request
// (act_alpha = kFailOnRequest).
#include <atomic>
#include <cmath>
#include <cstring>

#include "ktc/abi.h"
#include "ktc/codebook.h"

namespace {

constexpr float kFailOnRequest = -12345.0f;
constexpr float kNan = __builtin_nanf("");

std::atomic<int> thread_inits{0}, thread_finis{0};

float from_bf16(uint16_t v) {
  const uint32_t bits = static_cast<uint32_t>(v) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

uint16_t to_bf16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  if (f != f) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

constexpr int64_t step_k(int format) { return format == KTC_FP32 ? 16 : format == KTC_BF16 ? 32 : 64; }

uint8_t* act_cell(const ktc_act& act, int format, int64_t k_pad, int64_t m, int64_t k) {
  const int64_t steps = k_pad / step_k(format);
  uint8_t* row = act.tiles + ((m / 16) * steps + k / step_k(format)) * 1024 + (m % 16) * 64;
  return row + k % step_k(format) * (64 / step_k(format));
}

template <int Format>
float act_value(const ktc_act& act, int64_t k_pad, int64_t m, int64_t k) {
  const uint8_t* cell = act_cell(act, Format, k_pad, m, k);
  if (Format == KTC_FP32) {
    float f;
    std::memcpy(&f, cell, 4);
    return f;
  }
  if (Format == KTC_BF16) {
    uint16_t h;
    std::memcpy(&h, cell, 2);
    return from_bf16(h);
  }
  return static_cast<int8_t>(*cell);
}

// Row n of block `b` (0..31): the stored element, integers without their offset.
template <int Format>
float weight_value(const uint8_t* tiles, int64_t k_pad, int64_t b, int64_t n, int64_t k) {
  constexpr int64_t step = step_k(Format), per_word = step / 16, halves = Format == KTC_INT4 ? 1 : 2;
  const int64_t h = Format == KTC_INT4 ? 0 : n / 16;
  const int64_t s = k / step, r = k % step / per_word, c = n % 16, j = k % per_word;
  const uint8_t* word = tiles + ((b * (k_pad / step) + s) * halves + h) * 1024 + r * 64 + c * 4;
  if (Format == KTC_FP32) {
    float f;
    std::memcpy(&f, word, 4);
    return f;
  }
  if (Format == KTC_BF16) {
    uint16_t v;
    std::memcpy(&v, word + 2 * j, 2);
    return from_bf16(v);
  }
  if (Format == KTC_INT8) return static_cast<float>(word[j] - 128);
  return static_cast<float>((n < 16 ? word[j] & 15 : word[j] >> 4) - 8);
}

template <int Format, int Scale, int Group>
float dot(const ktc_gemm_args& a, int64_t m, int64_t b, int64_t n) {
  if (Format == KTC_FP32 || Format == KTC_BF16) {
    float y = 0;
    for (int64_t k = 0; k < a.k; ++k)
      y += act_value<Format>(a.act, a.k, m, k) * weight_value<Format>(a.weight.tiles, a.k, b, n, k);
    return y;
  }
  const int64_t width = Group ? Group : a.k, groups = (a.k + width - 1) / width;
  float y = 0;
  int64_t total = 0;
  for (int64_t g = 0; g < groups; ++g) {
    int64_t acc = 0;
    for (int64_t k = g * width; k < a.k && k < (g + 1) * width; ++k) {
      int64_t w = static_cast<int64_t>(weight_value<Format>(a.weight.tiles, a.k, b, n, k));
      if (Scale == KTC_SCALE_CODEBOOK) {
        const int both = a.weight.mult[(b * groups + g) * 16 + n % 16];
        w = ktc::codebook_level(n < 16 ? both & 15 : both >> 4, static_cast<int>(w) + 8);
      }
      const int64_t x = static_cast<int64_t>(act_value<Format>(a.act, a.k, m, k));
      acc += (w + 128) * x;  // as unsigned weights would give it
    }
    // `sums` has one entry per group of KTC_SCALE_GROUP, else one per row.
    int64_t sum = 0;
    for (int64_t k = g * width; k < a.k && k < (g + 1) * width; ++k)
      sum += static_cast<int64_t>(act_value<Format>(a.act, a.k, m, k));
    if (Scale == KTC_SCALE_GROUP) sum = a.act.sums[m * groups + g];
    if (Scale == KTC_SCALE_CHANNEL) sum = a.act.sums[m];
    acc -= 128 * sum;
    const int64_t at = b * groups * 32 + g * 32 + n;
    if (Scale == KTC_SCALE_GROUP)
      y += a.weight.scale[at] * static_cast<float>(acc);
    else
      total += Scale == KTC_SCALE_INTEGER ? acc * a.weight.mult[at] : acc;
  }
  if (Scale != KTC_SCALE_GROUP) y = a.weight.scale[b * 32 + n] * static_cast<float>(total);
  return y * a.act.scale[m];
}

void raise_amax(float* amax, float h) {
  uint32_t bits;
  h = std::fabs(h);
  if (!(h <= 3.4028235e38f)) h = kNan;
  std::memcpy(&bits, &h, 4);
  auto* word = reinterpret_cast<uint32_t*>(amax);
  uint32_t old = __atomic_load_n(word, __ATOMIC_RELAXED);
  // Non-negative floats order like their bits, and a NaN is above them all.
  while (old < bits &&
         !__atomic_compare_exchange_n(word, &old, bits, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

float gated(int epilogue, float gate, float up, float alpha, float limit) {
  if (epilogue != KTC_SILU_MUL) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  if (epilogue == KTC_SWIGLU_OAI) return (up + 1.0f) * gate / (1.0f + std::exp(-alpha * gate));
  return gate / (1.0f + std::exp(-gate)) * up;
}

template <int Format, int Scale, int Group, int Epilogue>
int gemm(const ktc_gemm_args* args) {
  const ktc_gemm_args& a = *args;
  if (a.struct_size < sizeof(ktc_gemm_args) || a.m_begin % 16 != 0 || a.k % 64 != 0) return KTC_ERR_ARGS;
  if (a.act_alpha == kFailOnRequest) return KTC_ERR_UNSUPPORTED;
  const auto bias = [&](int64_t b, int64_t n) { return a.weight.bias ? a.weight.bias[b * 32 + n] : 0.0f; };
  for (int64_t m = a.m_begin; m < a.m_end; ++m) {
    for (int64_t b = a.block_begin; b < a.block_end; ++b) {
      for (int64_t c = 0; c < 32; ++c) {
        if (Epilogue == KTC_STORE || Epilogue == KTC_SCATTER_ADD) {
          const int64_t column = 32 * b + c;
          if (column >= a.n_out) break;
          const float y = dot<Format, Scale, Group>(a, m, b, c) + bias(b, c);
          if (Epilogue == KTC_STORE)
            a.out[m * a.ld_out + column] = y;
          else
            a.out[a.row_index[m] * a.ld_out + column] += a.row_weight[m] * y;
        } else {
          const int64_t column = 16 * b + c;
          if (c == 16 || column >= a.n_out) break;
          const float gate = dot<Format, Scale, Group>(a, m, b, c) + bias(b, c);
          const float up = dot<Format, Scale, Group>(a, m, b, c + 16) + bias(b, c + 16);
          const float h = gated(Epilogue, gate, up, a.act_alpha, a.act_limit);
          a.out[m * a.ld_out + column] = h;
          if (a.row_amax) raise_amax(a.row_amax + m, h);
        }
      }
    }
  }
  return KTC_OK;
}

template <int Format, int Group>
int quantize(const ktc_quant_args* args) {
  const ktc_quant_args& a = *args;
  if (a.struct_size < sizeof(ktc_quant_args) || a.k % 64 != 0 || a.copies < 1) return KTC_ERR_ARGS;
  const int64_t width = Group ? Group : a.k, groups = (a.k + width - 1) / width;
  for (int64_t m = a.m_begin; m < a.m_end; ++m) {
    const float* x = a.x + m * a.ld_x;
    for (int64_t copy = 0; copy < a.copies; ++copy) {
      const int64_t dst = a.dst_row ? a.dst_row[m * a.copies + copy] : m * a.copies + copy;
      if (dst < 0) continue;
      float amax = 0;
      bool finite = true;
      for (int64_t k = 0; k < a.k_valid; ++k) {
        finite = finite && std::fabs(x[k]) <= 3.4028235e38f;
        amax = std::fmax(amax, std::fabs(x[k]));
      }
      if (a.amax) amax = a.amax[dst];
      finite = finite && amax == amax;
      if (Format == KTC_INT8 || Format == KTC_INT4) {
        a.act.scale[dst] = finite ? amax / 127.0f : kNan;
        std::memset(a.act.sums + dst * groups, 0, groups * sizeof(int32_t));
      }
      for (int64_t k = 0; k < a.k; ++k) {
        const float v = k < a.k_valid ? x[k] : 0.0f;
        uint8_t* cell = act_cell(a.act, Format, a.k, dst, k);
        if (Format == KTC_FP32) {
          std::memcpy(cell, &v, 4);
        } else if (Format == KTC_BF16) {
          const uint16_t h = to_bf16(v);
          std::memcpy(cell, &h, 2);
        } else {
          const float q = finite && amax > 0 ? std::nearbyint(v * (127.0f / amax)) : 0.0f;
          const int8_t s = static_cast<int8_t>(std::fmin(127.0f, std::fmax(-127.0f, q)));
          std::memcpy(cell, &s, 1);
          a.act.sums[dst * groups + k / width] += s;
        }
      }
    }
  }
  return KTC_OK;
}

// ---- the table ----------------------------------------------------------------------------------

ktc_gemm_kernel table[512];
uint32_t table_size = 0;

template <int Format, int Scale, int Group, int Epilogue>
void add(const char* name, int min_rows) {
  table[table_size++] = {sizeof(ktc_gemm_kernel),
                         Format,
                         Scale,
                         Epilogue,
                         Group,
                         min_rows,
                         0,
                         4096,
                         &gemm<Format, Scale, Group, Epilogue>,
                         &quantize < Format,
                         Scale == KTC_SCALE_GROUP ? Group : 0 >,
                         name};
}

template <int Format, int Scale, int Group>
void add_all() {
  // Two names for the same code: the runtime must choose between them by row count.
  add<Format, Scale, Group, KTC_STORE>("reference_few", 0);
  add<Format, Scale, Group, KTC_STORE>("reference_many", 5);
  add<Format, Scale, Group, KTC_SCATTER_ADD>("reference_few", 0);
  add<Format, Scale, Group, KTC_SCATTER_ADD>("reference_many", 5);
  add<Format, Scale, Group, KTC_SILU_MUL>("reference_few", 0);
  add<Format, Scale, Group, KTC_SILU_MUL>("reference_many", 5);
  add<Format, Scale, Group, KTC_SILU_CLAMP>("reference_few", 0);
  add<Format, Scale, Group, KTC_SWIGLU_OAI>("reference_few", 0);
}

int on_thread_init() { return ++thread_inits, KTC_OK; }
int on_thread_fini() { return ++thread_finis, KTC_OK; }

ktc_kernel_lib make_lib() {
  add_all<KTC_FP32, KTC_SCALE_NONE, 0>();
  add_all<KTC_BF16, KTC_SCALE_NONE, 0>();
  add_all<KTC_INT8, KTC_SCALE_CHANNEL, 0>();
  add_all<KTC_INT8, KTC_SCALE_GROUP, 64>();
  add_all<KTC_INT8, KTC_SCALE_GROUP, 128>();
  add_all<KTC_INT4, KTC_SCALE_GROUP, 32>();
  add_all<KTC_INT4, KTC_SCALE_GROUP, 128>();
  add_all<KTC_INT4, KTC_SCALE_INTEGER, 16>();
  add_all<KTC_INT4, KTC_SCALE_INTEGER, 64>();
  add_all<KTC_INT4, KTC_SCALE_CODEBOOK, 16>();
  return {sizeof(ktc_kernel_lib),
          KTC_ABI_VERSION,
          KTC_LAYOUT_VERSION,
          table_size,
          table,
          "reference",
          "sse2",
          "0",
          &on_thread_init,
          &on_thread_fini};
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const ktc_kernel_lib* ktc_kernel_query(
    uint32_t abi_version) {
  static const ktc_kernel_lib lib = make_lib();
  return abi_version == KTC_ABI_VERSION ? &lib : nullptr;
}

extern "C" __attribute__((visibility("default"))) int ktc_test_threads(int fini) {
  return fini ? thread_finis.load() : thread_inits.load();
}
