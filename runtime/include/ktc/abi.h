/* The C ABI between the ktc runtime and a generated kernel library.
 *
 * A kernel library (`libktc_experts.so`) is built once per ISA variant and exports exactly one
 * symbol, `ktc_kernel_query`. It links neither torch nor Python nor the runtime; it allocates
 * nothing, keeps no mutable state and never throws, prints or aborts: every entry returns a status.
 *
 * What this header is not: the runtime's own API (see runtime/src) or the algorithms (ktc/kernels).
 *
 * ---- Layouts (layout version 1; docs/bundle-format.md holds the prose) -----------------------
 * Letters: N output rows of a matrix W [N, K], K its columns, M rows of activations.
 * W is stored in N-blocks of 32 rows. In an N-block, K advances in steps of 64 bytes of operand;
 * a step holds 1 KB tiles of 16 rows x 64 bytes ("VNNI" order, the B operand of AMX):
 *   fp32  step = 16 k, 2 tiles (h = 0, 1): f32 [r][c]      = W[32b + 16h + c][16s + r]
 *   bf16  step = 32 k, 2 tiles (h = 0, 1): b16 [r][2c + j] = W[32b + 16h + c][32s + 2r + j]
 *   int8  step = 64 k, 2 tiles (h = 0, 1): u8  [r][4c + j] = q[32b + 16h + c][64s + 4r + j] + 128
 *   int4  step = 64 k, 1 tile:             u8  [r][4c + j] = lo | hi << 4 with
 *                       lo = q[32b + c][64s + 4r + j] + 8,  hi = q[32b + 16 + c][64s + 4r + j] + 8
 * A tile is at ((b * steps + s) * tiles_per_step + h) * 1024. N is padded to 32, K to 64 with the
 * weight 0 (so 0x80 for int8, 0x88 for int4).
 * Gate and up of an expert are one matrix of 2 * I_pad rows (I_pad = I rounded up to 64): rows
 * 32b..32b+15 are gate rows 16b.., rows 32b+16..32b+31 are up rows 16b... Down is [H, I_pad].
 *
 * Scales, for groups of `group` consecutive k (group 0 = the whole row):
 *   KTC_SCALE_CHANNEL   w = scale[n] * q                      scale f32 [N_pad]
 *   KTC_SCALE_GROUP     w = scale[n, g] * q                   scale f32 [N_pad/32][groups][32]
 *   KTC_SCALE_INTEGER   w = scale[n] * mult[n, g] * q (int4)  scale f32 [N_pad],
 *                       mult u8 [N_pad/32][groups][32], 0..16, so that mult * q is in [-128, 112]
 *   KTC_SCALE_CODEBOOK  w = scale[n] * level(sel[n, g], nibble) (int4; group 16, 32, 64 or 128)
 *                       scale f32 [N_pad], mult u8 [N_pad/32][groups][16]: byte c of group g in block b
 *                       is sel[32b + c, g] | sel[32b + 16 + c, g] << 4. A selector is bits 0-2 = which
 *                       multiplier, bit 3 = the negated codebook:
 *                         level = +-((codebook[nibble] * multiplier[sel & 7] + 64) >> 7), in [-126, 126]
 *                       with the constants of ktc/codebook.h. Tiles are as for int4; nibble 8 is level 0
 *                       under every selector, so that padding stays 0x88.
 * groups = ceil(K_pad / group). With KTC_SCALE_CHANNEL / INTEGER / CODEBOOK the kernel accumulates int32
 * over the whole of K and touches fp32 once per output.
 *
 * Activations of the integer formats are quantised symmetrically per row to s8 in [-127, 127]
 * (scale = amax / 127, round to nearest even; an all-zero row has scale 0; a row with a NaN or an
 * infinity has scale NaN, so that it poisons itself and no other row). Because weights are stored
 * unsigned, each row carries its sums: acc(u8 w, s8 x) - 128 * sum(x) is the signed product.
 * All activation formats are stored as A tiles of 16 rows x 64 bytes:
 *   row m, step s at ((m / 16) * steps + s) * 1024 + (m % 16) * 64, the step's k in order.
 * Rows past M in the last tile may hold anything: rows never influence each other.
 */
#ifndef KTC_ABI_H
#define KTC_ABI_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define KTC_ABI_VERSION 1u
#define KTC_LAYOUT_VERSION 1u
#define KTC_QUERY_SYMBOL "ktc_kernel_query"

enum ktc_format { KTC_FP32 = 0, KTC_BF16 = 1, KTC_INT8 = 2, KTC_INT4 = 3 };
enum ktc_scale {
  KTC_SCALE_NONE = 0,
  KTC_SCALE_CHANNEL = 1,
  KTC_SCALE_GROUP = 2,
  KTC_SCALE_INTEGER = 3,
  KTC_SCALE_CODEBOOK = 4
};

/* What happens to a 32-row result. GATED kinds combine gate (rows 0-15) and up (rows 16-31). */
enum ktc_epilogue {
  KTC_STORE = 0,       /* out[m, n]  = y + bias                                                  */
  KTC_SCATTER_ADD = 1, /* out[row_index[m], n] += row_weight[m] * (y + bias)                     */
  KTC_SILU_MUL = 2,    /* h = silu(gate) * up                                                    */
  KTC_SILU_CLAMP = 3,  /* gate = min(gate, limit), up = clamp(up, +-limit), h = silu(gate) * up  */
  KTC_SWIGLU_OAI = 4   /* gpt-oss: as above, then h = (up + 1) * gate * sigmoid(alpha * gate)    */
};

enum ktc_status { KTC_OK = 0, KTC_ERR_ARGS = 1, KTC_ERR_UNSUPPORTED = 2 };

/* Packed activations of M rows (see the layout above). */
typedef struct ktc_act {
  uint8_t* tiles; /* [ceil(M/16)][steps][1024], 64-byte aligned                                 */
  float* scale;   /* [M]; integer formats only                                                  */
  int32_t* sums;  /* [M][groups]; integer formats only. groups = 1 unless KTC_SCALE_GROUP       */
} ktc_act;

typedef struct ktc_weight {
  const uint8_t* tiles; /* 64-byte aligned                                                       */
  const float* scale;
  const uint8_t* mult;
  const float* bias; /* f32 [N_pad] in the matrix's own row order, or NULL                    */
} ktc_weight;

/* One task: rows [m_begin, m_end) of the activations against N-blocks [block_begin, block_end).
 * m_begin must be a multiple of 16. Output column of block b: 32b (STORE, SCATTER_ADD), 16b (GATED).
 * Columns >= n_out are not written (so outputs need no padding); a GATED kernel has n_out = I_pad. */
typedef struct ktc_gemm_args {
  uint32_t struct_size;
  uint32_t flags; /* reserved, 0                                                      */
  int64_t k;      /* K_pad; must equal the kernel's k unless that is 0                */
  int64_t m_begin, m_end;
  int64_t block_begin, block_end;
  int64_t n_out;
  ktc_act act;
  ktc_weight weight;
  float* out;
  int64_t ld_out;           /* floats between rows of out                                       */
  const int64_t* row_index; /* SCATTER_ADD: output row of each activation row m (indexed by m)  */
  const float* row_weight;  /* SCATTER_ADD                                                      */
  float* row_amax;          /* GATED, optional: [M], atomically raised to max |h| of the row;
                               set to NaN for good by a NaN or infinity. May be NULL            */
  float act_alpha, act_limit;
  void* scratch; /* thread-local, 64-byte aligned, scratch_bytes of the kernel       */
} ktc_gemm_args;

/* Quantise/convert rows [m_begin, m_end) of x (f32, row stride ld_x, k_valid columns, zero padded
 * to K_pad) into packed activations. Destination row of source row m is dst_row[m] (or m if NULL);
 * `copies` > 1 writes each source row to dst_row[m * copies .. + copies) (one per routed slot).
 * `amax`, if given, is the known max |x| per *destination* row (so that every NUMA slice uses the
 * same scale); `group` only matters for act->sums. */
typedef struct ktc_quant_args {
  uint32_t struct_size;
  uint32_t flags;
  int64_t k_valid, k; /* k = K_pad                                                        */
  int64_t m_begin, m_end;
  const float* x;
  int64_t ld_x;
  const int64_t* dst_row; /* entries < 0 are skipped                                          */
  int64_t copies;         /* >= 1                                                             */
  const float* amax;
  ktc_act act;
} ktc_quant_args;

typedef struct ktc_gemm_kernel {
  uint32_t struct_size;
  int32_t format, scale, epilogue;
  int32_t group;         /* 0 = whole row                                                    */
  int32_t min_rows;      /* the caller should prefer another kernel below this (hint)        */
  int64_t k;             /* specialised K_pad, or 0 for any multiple of 64                   */
  int64_t scratch_bytes; /* per thread                                                       */
  int (*gemm)(const ktc_gemm_args*);
  int (*quantize)(const ktc_quant_args*);
  const char* name;
} ktc_gemm_kernel;

typedef struct ktc_kernel_lib {
  uint32_t struct_size;
  uint32_t abi_version;
  uint32_t layout_version;
  uint32_t kernel_count;
  const ktc_gemm_kernel* kernels;
  const char* variant;           /* "portable", "avx2", "avx512", "amx", "emulated"              */
  const char* required_features; /* space separated names as in /proc/cpuinfo                    */
  const char* source_key;        /* the build key, hex                                           */
  int (*thread_init)(void);      /* tile configuration; once per worker thread. May be NULL      */
  int (*thread_fini)(void);      /* tile release. May be NULL                                    */
} ktc_kernel_lib;

/* NULL if the library does not speak `abi_version`. */
typedef const ktc_kernel_lib* (*ktc_kernel_query_fn)(uint32_t abi_version);

#ifdef __cplusplus
}
#endif
#endif /* KTC_ABI_H */
