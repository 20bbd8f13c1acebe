// The native operators of the decode graph that are not packed GEMMs: one table of functions per ISA.
//
// Every function works on a range of rows (or one tile) and keeps no state, so that callers may
// spread ranges over threads in any way: the result does not depend on it. Rows never influence each
// other: a NaN poisons its own row only. All activations are f32; "any matrix" arguments may be f32,
// bf16 or fp16. Reductions use 16 lanes and one fixed tree on every ISA; avx2 and avx512 fuse
// multiply-adds in matrix products and so agree with each other bit for bit, baseline differs by rounding.
// Not here: spreading over threads (parallel.h, attention.h), the graph (graph/).
#pragma once

#include <cstdint>

namespace ktc::ops {

enum class DType : int32_t { kF32 = 0, kBF16 = 1, kF16 = 2 };

// A row-major matrix in memory that the operators only read.
struct Matrix {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t ld = 0;  // elements between rows

  Matrix rows(int64_t begin) const {
    const int64_t size = dtype == DType::kF32 ? 4 : 2;
    return {static_cast<const char*>(data) + begin * ld * size, dtype, ld};
  }
};

// RMS norm of T rows of `groups` consecutive groups of `cols` (groups = heads for a per-head norm).
// x' = x + scale * (a + b) is written to `sum` first when `a` is given (b may be null).
struct NormArgs {
  const float* x;
  const float* a;
  const float* b;
  float* sum;
  float scale;
  const float* weight;  // [cols]
  float eps;
  int64_t cols, groups;
  float* y;
};

enum class Rope : int32_t {
  kHalf = 0,             // pairs (i, i + d/2), in place
  kInterleavedHalf = 1,  // pairs (2i, 2i+1) in, [first | second] out (deepseek_v3)
  kInterleaved = 2       // pairs (2i, 2i+1) in and out (deepseek_v2's complex form)
};

enum class Score : int32_t { kSoftmax = 0, kSigmoid = 1, kTopKSoftmax = 2 };
enum class GroupScore : int32_t { kNone = 0, kMax = 1, kTop2Sum = 2 };

// Router over logits [rows, experts]. The flavours of every supported family; see docs/graph.md.
struct RouterArgs {
  Score score;
  GroupScore group_score;
  int32_t experts, top_k, n_group, topk_group;
  const float* choice_bias;  // added to the score for the choice only, or null
  int32_t renormalise;
  float renormalise_eps;  // added to the sum
  float scale;
};

// One attention tile: `pairs` query rows that share a KV head, keys [k_begin, k_end).
// Query pair p is row `first_pair + p`; its token is that / group and it sees keys up to
// position + token, no further back than window (0 = no limit).
struct AttendArgs {
  const float* q;  // [pairs][dk], contiguous
  const float* k;  // key rows of this KV head, stride ld_k
  const float* v;
  int64_t ld_k, ld_v, dk, dv;
  int64_t pairs, first_pair, group, position, window;
  int64_t k_begin, k_end;
  float scale;    // of the scores, > 0
  float* m;       // [pairs] running max, in and out (start: -inf, or the sink logit)
  float* l;       // [pairs] running sum (start: 0, or 1 with a sink)
  float* acc;     // [pairs][dv] (start: 0)
  float* scores;  // scratch [pairs][kKeyBlock]
};
struct Tiles;  // tiles.h

constexpr int64_t kMaxRopeHalf = 1024;  // checked when a program is built
constexpr int64_t kKeyBlock = 64;
constexpr int64_t kPairTile = 32;

struct Table {
  const char* name;
  // y[t][n] = x[t] . w[n] + bias[n]
  void (*gemm_nt)(const float* x, int64_t ld_x, int64_t t, Matrix w, int64_t n, int64_t k, const float* bias,
                  float* y, int64_t ld_y);
  // y[t] (+)= sum_k x[t][k] * w[k]
  void (*gemm_nn)(const float* x, int64_t ld_x, int64_t t, Matrix w, int64_t k, int64_t n, bool accumulate,
                  float* y, int64_t ld_y);
  void (*norm)(const NormArgs&, int64_t row_begin, int64_t row_end);
  void (*embed)(const int64_t* ids, int64_t begin, int64_t end, Matrix table, int64_t cols, float scale,
                float* y);
  // cos, sin [rows][half] for positions position + row
  void (*rope_table)(const float* inv_freq, int64_t half, float scaling, int64_t position, int64_t begin,
                     int64_t end, float* cos, float* sin);
  // one vector: rotates the first 2 * half elements of x into y (may alias); copies the rest
  void (*rope)(const float* x, int64_t dim, int64_t half, const float* cos, const float* sin, Rope style,
               float* y);
  void (*router)(const RouterArgs&, const float* logits, int64_t begin, int64_t end, float* scratch,
                 float* weights, int64_t* ids);
  void (*attend)(const AttendArgs&);
  void (*silu_mul)(const float* gate, const float* up, int64_t count, float* y);
  // y[t] = sigmoid(g[t]) * x[t]
  void (*sigmoid_mul)(const float* g, const float* x, int64_t cols, int64_t begin, int64_t end, float* y);
  // y = sa * a + sb * b (b may be null)
  void (*axpby)(const float* a, float sa, const float* b, float sb, int64_t count, float* y);
  void (*clamp)(const float* x, float limit, int64_t count, float* y);
  // Merges split-context partials of one pair: parts x {m, l, acc[dv]} with strides -> out [dv]
  void (*merge)(const float* m, const float* l, const float* acc, int64_t parts, int64_t stride_ml,
                int64_t stride_acc, int64_t dv, float* out);
  // Attention of many rows: in f32, and in bf16 where the CPU multiplies bf16 (else null).
  const Tiles* tiles_f32;
  const Tiles* tiles_bf16;
};

// The best table for this host, or the one that KTC_OPS_ISA / `force` names ("baseline", "avx2", "avx512",
// "avx512_bf16", "amx"; the last two are avx512 with bf16 attention). Null if the forced one is unknown or
// needs a feature that this host lacks.
const Table* table(const char* force = nullptr);

// Floats of scratch that router() needs per call.
inline int64_t router_scratch(int64_t experts, int64_t n_group) { return 2 * experts + n_group + 64; }

}  // namespace ktc::ops
