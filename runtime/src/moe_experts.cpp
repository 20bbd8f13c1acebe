// The tasks of a MoE call that goes by experts: one takes some rows of one expert through both GEMMs, another
// adds up what the experts of a token gave. Who does which rows is decided in moe_call.cpp.
//
// Quantised rows are gathered from the tokens' own; h and its quantised form never leave the thread.
#include <algorithm>
#include <cstring>

#include "moe_call.h"
#include "splitting.h"

namespace ktc {
namespace {

constexpr int64_t kCalledBytes = 32 << 10;

// Hands out 64-byte aligned parts of a task's scratch; from a null pointer, just counts.
class Parts {
 public:
  explicit Parts(void* base) : base_(static_cast<uint8_t*>(base)) {}
  template <typename T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(base_ + used_);
    used_ += Arena::bytes_for<T>(count);
    return p;
  }
  ktc_act take_act(const Scheme& scheme, int64_t rows, int64_t k) {
    ktc_act act{};
    act.tiles = take<uint8_t>(rows / 16 * scheme.steps(k) * 1024);
    if (scheme.integer()) {
      act.scale = take<float>(rows);
      act.sums = take<int32_t>(rows * scheme.act_groups(k));
    }
    return act;
  }
  int64_t used() const { return used_; }

 private:
  uint8_t* base_;
  int64_t used_ = 0;
};

struct ExpertScratch {
  ktc_act x, h_act;
  float* h;
  void* kernel;
  ExpertScratch(Parts& parts, const Scheme& scheme, int64_t rows, int64_t k, int64_t width) {
    x = parts.take_act(scheme, rows, k);
    h = parts.take<float>(rows * row_stride(width));
    h_act = parts.take_act(scheme, rows, width);
    kernel = parts.take<uint8_t>(0);
  }
};

// Rows of `unit` from the tokens' activations. A row's lines lie a tile apart: the next row's are called
// early.
void gather(const MoeCall& call, const MoeCall::Unit& unit, const Scheme& scheme, int64_t k, ktc_act& to) {
  const ktc_act& from = call.token_act;
  const int64_t steps = scheme.steps(k), groups = scheme.act_groups(k);
  const auto first_line = [&](int64_t r) {
    const int64_t t = call.row_index[unit.row + r];
    return from.tiles + t / 16 * steps * 1024 + t % 16 * 64;
  };
  for (int64_t r = 0; r < unit.count; ++r) {
    const uint8_t* source = first_line(r);
    const uint8_t* next = first_line(std::min(r + 1, unit.count - 1));
    uint8_t* target = to.tiles + r / 16 * steps * 1024 + r % 16 * 64;
    for (int64_t s = 0; s < steps; ++s) {
      __builtin_prefetch(next + s * 1024);
      std::memcpy(target + s * 1024, source + s * 1024, 64);
    }
    if (!scheme.integer()) continue;
    const int64_t t = call.row_index[unit.row + r];
    to.scale[r] = from.scale[t];
    std::copy(from.sums + t * groups, from.sums + (t + 1) * groups, to.sums + r * groups);
  }
}

// Calls the beginning of a matrix into L2, so that its first product need not wait for DRAM.
// A prefetch of a page that is not in the TLB is dropped by some CPUs, so one line is read.
void call_weights(const ktc_weight& weight, int64_t bytes) {
  static_cast<void>(*static_cast<const volatile uint8_t*>(weight.tiles));
  for (int64_t at = 0; at < std::min(bytes, kCalledBytes); at += 64)
    __builtin_prefetch(weight.tiles + at, 0, 2);
}

// out[0..n) = sum over i of w[i] * y[i][0..n), in this order; `next`: rows that will be added after these.
void weighted_sum(float* out, int64_t n, const float* const* y, const float* w, const float* const* next,
                  int64_t rows) {
  constexpr int64_t kColumns = 32;
  int64_t c = 0;
  for (; c + kColumns <= n; c += kColumns) {
    float sum[kColumns] = {};
    for (int64_t i = 0; i < rows; ++i) {
      __builtin_prefetch(next[i] + c);
      __builtin_prefetch(next[i] + c + 16);
      for (int64_t j = 0; j < kColumns; ++j) sum[j] += w[i] * y[i][c + j];
    }
    std::memcpy(out + c, sum, sizeof sum);
  }
  for (; c < n; ++c) {
    float sum = 0.0f;
    for (int64_t i = 0; i < rows; ++i) sum += w[i] * y[i][c];
    out[c] = sum;
  }
}

}  // namespace

int64_t MoeCall::expert_scratch(const Moe& moe) {
  Parts parts(nullptr);
  ExpertScratch(parts, moe.o_.scheme, kMaxUnitRows + kMaxUnitRows / 4, moe.h_pad_, moe.o_.nodes[0].width());
  return parts.used();
}

void MoeCall::expert_task(void* context, const Task& task) {
  const MoeCall& call = *static_cast<const MoeCall*>(context);
  if (task.index >= call.unit_count) {
    call.divided_down(task.index - call.unit_count, task.scratch);
    return;
  }
  const MoeOptions& o = call.m.o_;
  const Unit& unit = call.units[task.index];
  const Active& a = call.active[unit.active];
  const int64_t width = o.nodes[0].width();
  Parts parts(task.scratch);
  ExpertScratch local(parts, o.scheme, kMaxUnitRows + kMaxUnitRows / 4, call.m.h_pad_, width);
  const int64_t up_blocks = width / 16, down_blocks = ceil_div(o.hidden, 32);
  call_weights(o.nodes[0].gate_up[a.expert], up_blocks * o.scheme.block_bytes(call.m.h_pad_));
  gather(call, unit, o.scheme, call.m.h_pad_, local.x);

  call.gate_up({a, unit.count, 0, up_blocks, local.kernel}, local.x, local.h);
  call_weights(o.nodes[0].down[a.expert], down_blocks * o.scheme.block_bytes(width));
  call.quantize_h(unit.count, local.h, local.h_act);
  call.down({a, unit.count, 0, down_blocks, local.kernel}, local.h_act,
            call.y + unit.row * row_stride(o.hidden));
}

// The expert's own number of rows chooses the kernel, not the product's: bits must not depend on the threads.

void MoeCall::gate_up(const Product& p, const ktc_act& x, float* h) const {
  const MoeOptions& o = m.o_;
  ktc_gemm_args args = p.args();
  args.k = m.h_pad_;
  args.n_out = o.nodes[0].width();
  args.act = x;
  args.weight = o.nodes[0].gate_up[p.active.expert];
  args.out = h;
  args.ld_out = row_stride(args.n_out);
  args.act_alpha = o.alpha;
  args.act_limit = o.limit;
  const ktc_gemm_kernel& kernel = m.gate_up_[0].pick(p.active.count);
  check_kernel(kernel.gemm(&args), kernel.name);
}

void MoeCall::quantize_h(int64_t rows, const float* h, const ktc_act& to) const {
  const int64_t width = m.o_.nodes[0].width();
  ktc_quant_args args{};
  args.struct_size = sizeof args;
  args.k_valid = args.k = width;
  args.ld_x = row_stride(width);
  args.m_end = rows;
  args.x = h;
  args.copies = 1;
  args.act = to;
  check_kernel(m.down_store_[0].quantize()(&args), "quantize");
}

void MoeCall::down(const Product& p, const ktc_act& h, float* out) const {
  const MoeOptions& o = m.o_;
  ktc_gemm_args args = p.args();
  args.k = o.nodes[0].width();
  args.n_out = o.hidden;
  args.act = h;
  args.weight = o.nodes[0].down[p.active.expert];
  args.out = out;
  args.ld_out = row_stride(o.hidden);
  args.act_alpha = o.alpha;
  args.act_limit = o.limit;
  const ktc_gemm_kernel& kernel = m.down_store_[0].pick(p.active.count);
  check_kernel(kernel.gemm(&args), kernel.name);
}

ktc_gemm_args MoeCall::Product::args() const {
  ktc_gemm_args args{};
  args.struct_size = sizeof args;
  args.m_end = rows;
  args.block_begin = begin;
  args.block_end = end;
  args.scratch = scratch;
  return args;
}

// ---- experts that all threads share: one row each ------------------------------------------------

ktc_act MoeCall::divided_act(int64_t i) const {
  const Scheme& scheme = m.o_.scheme;
  const int64_t width = m.o_.nodes[0].width();
  ktc_act act = divided.act;
  act.tiles += i * scheme.steps(width) * 1024;
  if (scheme.integer()) {
    act.scale += i * 16;
    act.sums += i * 16 * scheme.act_groups(width);
  }
  return act;
}

void MoeCall::divided_gate_up(int64_t index, void* scratch) const {
  const int64_t i = index / divided.up_pieces, piece = index % divided.up_pieces;
  const int64_t width = m.o_.nodes[0].width(), blocks = width / 16;
  gate_up({active[unit_count + i], 1, piece_begin(blocks, divided.up_pieces, piece),
           piece_begin(blocks, divided.up_pieces, piece + 1), scratch},
          token_act, divided.h + i * row_stride(width));
}

void MoeCall::divided_down(int64_t index, void* scratch) const {
  const int64_t i = index / divided.down_pieces, piece = index % divided.down_pieces;
  const int64_t hidden = m.o_.hidden, blocks = ceil_div(hidden, 32);
  const Active& a = active[unit_count + i];
  down({a, 1, piece_begin(blocks, divided.down_pieces, piece),
        piece_begin(blocks, divided.down_pieces, piece + 1), scratch},
       divided_act(i), y + a.row * row_stride(hidden));
}

// ---- the sum ---------------------------------------------------------------------------------------

// Tokens of one piece: experts in ascending order, as by columns.
void MoeCall::sum_task(void* context, const Task& task) {
  const MoeCall& call = *static_cast<const MoeCall*>(context);
  constexpr int64_t kAtOnce = 16;  // slots; more are added to the first ones' sum
  const int64_t hidden = call.m.o_.hidden, stride = row_stride(hidden), k = call.top_k;
  const float* y[2][kAtOnce];
  float w[kAtOnce];
  const int64_t begin = piece_begin(call.count, call.pieces_sum, task.index);
  const int64_t end = piece_begin(call.count, call.pieces_sum, task.index + 1);
  const auto rows_of = [&](int64_t t, const float** rows) {
    for (int64_t i = 0; i < std::min(k, kAtOnce); ++i) rows[i] = call.y + call.token_rows[t * k + i] * stride;
  };
  if (begin < end) rows_of(begin, y[0]);
  for (int64_t t = begin; t < end; ++t) {
    const int64_t which = (t - begin) % 2;
    rows_of(std::min(t + 1, end - 1), y[which ^ 1]);
    float* out = call.out + (call.begin + t) * call.ld_out;
    const int64_t* rows = call.token_rows + t * k;
    for (int64_t i = 0; i < std::min(k, kAtOnce); ++i) w[i] = call.row_weight[rows[i]];
    weighted_sum(out, hidden, y[which], w, y[which ^ 1], std::min(k, kAtOnce));
    for (int64_t i = kAtOnce; i < k; ++i) {
      const float* more = call.y + rows[i] * stride;
      for (int64_t c = 0; c < hidden; ++c) out[c] += call.row_weight[rows[i]] * more[c];
    }
  }
}

}  // namespace ktc
