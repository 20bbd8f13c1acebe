// The tasks of a MoE call: each is one small piece of a phase, run by one thread.
#include <algorithm>
#include <cstring>

#include "moe_call.h"
#include "splitting.h"

namespace ktc {
void MoeCall::quantize_x_task(void* context, const Task& task) {
  const MoeCall& call = *static_cast<const MoeCall*>(context);
  const MoeOptions& o = call.m.o_;
  const int64_t piece =
      share_begin(call.pieces_x, task.node, static_cast<int>(call.nodes.size())) + task.index;
  ktc_quant_args args{};
  args.struct_size = sizeof args;
  args.k_valid = o.hidden;
  args.k = call.m.h_pad_;
  args.m_begin = piece_begin(call.count, call.pieces_x, piece);
  args.m_end = piece_begin(call.count, call.pieces_x, piece + 1);
  args.x = call.x + call.begin * call.ld_x;
  args.ld_x = call.ld_x;
  args.dst_row = call.by_experts ? nullptr : call.dst_row;
  args.copies = call.by_experts ? 1 : call.top_k;
  args.act = call.by_experts ? call.token_act : call.x_act;
  check_kernel(call.m.gate_up_[0].quantize()(&args), "quantize");
}

void MoeCall::gate_up_task(void* context, const Task& task) {
  const MoeCall& call = *static_cast<const MoeCall*>(context);
  if (call.by_experts) {
    call.divided_gate_up(task.index, task.scratch);
    return;
  }
  const MoeOptions& o = call.m.o_;
  const Node& node = call.nodes[task.node];
  const Panel& panel = node.panels[task.index];
  const Active& a = call.active[panel.active];
  const ktc_gemm_kernel& kernel = call.m.gate_up_[0].pick(a.count);
  ktc_gemm_args args{};
  args.struct_size = sizeof args;
  args.k = call.m.h_pad_;
  args.m_begin = a.row;
  args.m_end = a.row + a.count;
  args.block_begin = panel.begin;
  args.block_end = panel.end;
  args.n_out = o.nodes[task.node].width();
  args.act = call.x_act;
  args.weight = o.nodes[task.node].gate_up[a.expert];
  args.out = node.h;
  args.ld_out = row_stride(args.n_out);
  args.row_amax = call.row_amax;
  args.act_alpha = o.alpha;
  args.act_limit = o.limit;
  args.scratch = task.scratch;
  check_kernel(kernel.gemm(&args), kernel.name);
}

// Task i: the active rows [i, i + 1) * piece_h, counted without the padding between experts.
void MoeCall::quantize_h_task(void* context, const Task& task) {
  const MoeCall& call = *static_cast<const MoeCall*>(context);
  if (call.by_experts) {
    const int64_t width = call.m.o_.nodes[0].width();
    call.quantize_h(1, call.divided.h + task.index * row_stride(width), call.divided_act(task.index));
    return;
  }
  const int64_t width = call.m.o_.nodes[task.node].width();
  const Node& node = call.nodes[task.node];
  int64_t row = task.index * call.piece_h;
  const int64_t end = std::min(row + call.piece_h, call.count * call.top_k);
  const Active* const last = call.active + call.active_count;
  const Active* a = std::upper_bound<const Active*>(call.active, last, row,
                                                    [](int64_t r, const Active& x) { return r < x.first; }) -
                    1;
  ktc_quant_args args{};
  args.struct_size = sizeof args;
  args.k_valid = args.k = width;
  args.ld_x = row_stride(width);
  args.x = node.h;
  args.copies = 1;
  args.amax = call.row_amax;
  args.act = node.act;
  for (; row < end; ++a) {
    const int64_t n = std::min(end, a->first + a->count) - row;
    args.m_begin = a->row + (row - a->first);
    args.m_end = args.m_begin + n;
    check_kernel(call.m.down_[task.node].quantize()(&args), "quantize");
    row += n;
  }
}

void MoeCall::down_task(void* context, const Task& task) {
  const MoeCall& call = *static_cast<const MoeCall*>(context);
  const MoeOptions& o = call.m.o_;
  const Node& node = call.nodes[task.node];
  const int64_t blocks = ceil_div(o.hidden, 32);
  ktc_gemm_args args{};
  args.struct_size = sizeof args;
  args.k = o.nodes[task.node].width();
  args.block_begin = piece_begin(blocks, node.column_pieces, task.index);
  args.block_end = piece_begin(blocks, node.column_pieces, task.index + 1);
  args.n_out = o.hidden;
  args.act = node.act;
  args.out = task.node == 0 ? call.out + call.begin * call.ld_out : node.partial;
  args.ld_out = task.node == 0 ? call.ld_out : o.hidden;
  args.row_index = call.row_index;
  args.row_weight = call.row_weight;
  args.scratch = task.scratch;
  const int64_t first = 32 * args.block_begin;
  const int64_t columns = std::min(32 * args.block_end, o.hidden) - first;
  for (int64_t t = 0; t < call.count; ++t)
    std::memset(args.out + t * args.ld_out + first, 0, columns * sizeof(float));
  for (int64_t i = 0; i < call.active_count; ++i) {
    const Active& a = call.active[i];
    const ktc_gemm_kernel& kernel = call.m.down_[task.node].pick(a.count);
    args.m_begin = a.row;
    args.m_end = a.row + a.count;
    args.weight = o.nodes[task.node].down[a.expert];
    check_kernel(kernel.gemm(&args), kernel.name);
  }
}

void MoeCall::combine_task(void* context, const Task& task) {
  const MoeCall& call = *static_cast<const MoeCall*>(context);
  const int64_t hidden = call.m.o_.hidden;
  const int64_t piece =
      share_begin(call.pieces_out, task.node, static_cast<int>(call.nodes.size())) + task.index;
  const int64_t end = piece_begin(call.count, call.pieces_out, piece + 1);
  for (int64_t t = piece_begin(call.count, call.pieces_out, piece); t < end; ++t) {
    float* out = call.out + (call.begin + t) * call.ld_out;
    for (size_t n = 1; n < call.nodes.size(); ++n) {
      const float* part = call.nodes[n].partial + t * hidden;
      for (int64_t c = 0; c < hidden; ++c) out[c] += part[c];
    }
  }
}

}  // namespace ktc
