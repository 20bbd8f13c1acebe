// A MoE call before its tasks run: scratch, phases, the sort by expert and the cutting into tasks.
#include "moe_call.h"

#include <algorithm>

#include "splitting.h"

namespace ktc {
namespace {

enum Phase { kPlan, kQuantizeX, kGateUp, kQuantizeH, kDown, kCombine, kExperts, kSum, kPhases };

// Stands in for an Arena to find out how much `take` will ask for.
struct Measure {
  int64_t bytes = 0, most = 0;
  template <typename T>
  T* take(int64_t count) {
    bytes += Arena::bytes_for<T>(count);
    most = std::max(most, bytes);
    return nullptr;
  }
  int64_t mark() const { return bytes; }
  void rewind(int64_t mark) { bytes = mark; }
};

}  // namespace

template <typename Space>
ktc_act MoeCall::take_act(Space& space, int64_t rows, int64_t k_pad) const {
  const Scheme& scheme = m.o_.scheme;
  ktc_act act{};
  act.tiles = space.template take<uint8_t>(rows / 16 * scheme.steps(k_pad) * 1024);
  if (scheme.integer()) {
    act.scale = space.template take<float>(rows);
    act.sums = space.template take<int32_t>(rows * scheme.act_groups(k_pad));
  }
  return act;
}

template <typename Space>
void MoeCall::take(Space& space, int64_t total, bool staged) {
  const MoeOptions& o = m.o_;
  if (staged) {
    staged_x = space.template take<float>(total * o.hidden);
    staged_ids = space.template take<int64_t>(total * top_k);
    staged_weights = space.template take<float>(total * top_k);
    staged_out = space.template take<float>(total * o.hidden);
  }
  const int64_t chunk = m.chunk_tokens_ > 0 ? std::min(total, m.chunk_tokens_) : total;
  const int64_t slots = chunk * top_k;
  const int64_t max_active = std::min(o.experts, slots);
  const int64_t rows = round_up(slots + 15 * max_active, 16);  // every expert starts on a whole tile
  active = space.template take<Active>(max_active);
  expert_rows = space.template take<int64_t>(o.experts);
  dst_row = space.template take<int64_t>(slots);
  row_index = space.template take<int64_t>(rows);
  row_weight = space.template take<float>(rows);
  row_amax = o.scheme.integer() ? space.template take<float>(rows) : nullptr;
  const int64_t mark = space.mark();
  if (m.can_go_by_experts()) {
    units = space.template take<Unit>(max_active + slots / kMinUnitRows + 1);
    token_rows = space.template take<int64_t>(slots);
    token_act = take_act(space, round_up(chunk, 16), m.h_pad_);
    y = space.template take<float>(rows * row_stride(o.hidden));
    const int64_t width = o.nodes[0].width();
    divided.h = space.template take<float>(most_divided() * row_stride(width));
    divided.act = take_act(space, most_divided() * 16, width);
    space.rewind(mark);  // of one chunk, only one way's buffers are in use
  }
  x_act = take_act(space, rows, m.h_pad_);
  for (size_t n = 0; n < o.nodes.size(); ++n) {
    const int64_t width = o.nodes[n].width();
    nodes[n].h = space.template take<float>(rows * row_stride(width));
    nodes[n].act = take_act(space, rows, width);
    nodes[n].partial = n > 0 ? space.template take<float>(chunk * o.hidden) : nullptr;
    nodes[n].panels = space.template take<Panel>(max_active * (width / 16));
  }
}

int64_t MoeCall::scratch_bytes(const Moe& moe, int64_t tokens, bool staged) {
  MoeCall call(moe);
  call.top_k = moe.o_.top_k;
  Measure measure;
  call.take(measure, tokens, staged);
  return measure.most;
}

void MoeCall::lay_out(int64_t total, int64_t k, bool staged) {
  tokens = total;
  top_k = k;
  Measure measure;
  take(measure, total, staged);
  job->reset(m.lib_->raw(), m.o_.schedule, m.kernel_scratch_);
  job->arena.reserve(measure.most);
  take(job->arena, total, staged);
}

void MoeCall::add_phases() {
  constexpr TaskFunction functions[kPhases] = {&plan_task, &quantize_x_task, &gate_up_task, &quantize_h_task,
                                               &down_task, &combine_task,    &expert_task,  &sum_task};
  begin = count = 0;
  first_phase = -kPhases;
  for (int64_t done = 0; done < tokens; done += m.chunk_tokens_) {
    for (int p = 0; p < kPhases; ++p) {
      const int phase = job->add_phase(functions[p], this);
      if (p != kPlan) continue;
      job->set_serial(phase, true);
      job->set_tasks(phase, 0, 1);
    }
  }
}

// ---- plan: who goes where ------------------------------------------------------------------------

void MoeCall::plan_task(void* context, const Task&) {
  MoeCall& call = *static_cast<MoeCall*>(context);
  call.begin += call.count;
  call.count = std::min(call.m.chunk_tokens_, call.tokens - call.begin);
  call.first_phase += kPhases;
  call.sort_by_expert();
  call.cut_tasks();
}

// Stable counting sort of (token, slot) by expert; an expert's rows start on a whole tile.
void MoeCall::sort_by_expert() {
  const MoeOptions& o = m.o_;
  const int64_t slots = count * top_k;
  const int64_t* chunk_ids = ids + begin * top_k;
  std::fill(expert_rows, expert_rows + o.experts, 0);
  for (int64_t s = 0; s < slots; ++s) ++expert_rows[chunk_ids[s]];
  active_count = 0;
  int64_t row = 0, first = 0;
  for (int64_t e = 0; e < o.experts; ++e) {
    const int64_t n = expert_rows[e];
    if (n == 0) continue;
    active[active_count++] = Active{e, row, n, first};
    expert_rows[e] = row;  // from here on: the next free row
    row += round_up(n, 16);
    first += n;
  }
  for (int64_t s = 0; s < slots; ++s) {
    const int64_t at = expert_rows[chunk_ids[s]]++;
    dst_row[s] = at;
    row_index[at] = s / top_k;
    row_weight[at] = weights[begin * top_k + s];
  }
  if (row_amax != nullptr) std::fill(row_amax, row_amax + row, 0.0f);
}

void MoeCall::cut_tasks() {
  const MoeOptions& o = m.o_;
  const int node_count = static_cast<int>(nodes.size());
  const int64_t threads = m.pool_->threads();
  const int64_t slots = count * top_k;
  by_experts = cut_experts();

  const bool serial_x = slots * o.hidden <= kSerialElements;
  pieces_x = serial_x ? 1 : std::min(count, threads * 4);
  job->set_serial(first_phase + kQuantizeX, serial_x);

  const bool serial_h = slots * round_up(o.intermediate, 64) <= kSerialElements;
  piece_h = serial_h ? slots : std::max<int64_t>(8, ceil_div(slots, threads * 8));
  pieces_h = ceil_div(slots, piece_h);
  job->set_serial(first_phase + kQuantizeH, serial_h);

  const bool serial_out = count * o.hidden <= kSerialElements;
  pieces_out = node_count == 1 ? 0 : serial_out ? 1 : std::min(count, threads * 4);
  job->set_serial(first_phase + kCombine, serial_out);

  for (int n = 0; n < node_count; ++n) {
    const auto share = [n, node_count](int64_t total) {
      return share_begin(total, n + 1, node_count) - share_begin(total, n, node_count);
    };
    job->set_tasks(first_phase + kQuantizeX, n, share(pieces_x));
    if (by_experts) continue;
    job->set_tasks(first_phase + kQuantizeH, n, pieces_h);
    job->set_tasks(first_phase + kCombine, n, share(pieces_out));
    cut_gate_up(n);

    const int64_t blocks = ceil_div(o.hidden, 32);
    int64_t cost = 0;  // of one block over all active experts
    for (int64_t a = 0; a < active_count; ++a)
      cost += block_cost(o.scheme.block_bytes(o.nodes[n].width()), active[a].count);
    const int64_t target =
        std::max(blocks * cost / (m.pool_->node_threads(n) * kTasksPerThread), kMinTaskCost);
    // A call of the kernel begins slowly: its weights are not on their way yet.
    const int64_t block_bytes = o.scheme.block_bytes(o.nodes[n].width());
    const int64_t long_calls = long_pieces(blocks * block_bytes, kCallBytes, m.pool_->node_threads(n));
    nodes[n].column_pieces = std::min(pieces_for(blocks, cost, target), long_calls);
    job->set_tasks(first_phase + kDown, n, nodes[n].column_pieces);
  }
  for (int64_t a = 0; a < active_count; ++a) {
    m.gate_up_[0].count(active[a].count);
    for (const KernelChoice& choice : m.down_) choice.count(active[a].count);
  }
}

void MoeCall::cut_gate_up(int n) {
  const int64_t blocks = m.o_.nodes[n].width() / 16;
  const int64_t block_bytes = m.o_.scheme.block_bytes(m.h_pad_);
  int64_t total = 0;
  for (int64_t a = 0; a < active_count; ++a) total += blocks * block_cost(block_bytes, active[a].count);
  const int64_t target = std::max(total / (m.pool_->node_threads(n) * kTasksPerThread), kMinTaskCost);
  const int64_t l2_pieces = std::min(blocks, ceil_div(blocks * block_bytes, kPanelBytes));
  int64_t tasks = 0;
  for (int64_t a = 0; a < active_count; ++a) {
    const int64_t pieces =
        std::max(pieces_for(blocks, block_cost(block_bytes, active[a].count), target), l2_pieces);
    for (int64_t p = 0; p < pieces; ++p)
      nodes[n].panels[tasks++] = Panel{a, piece_begin(blocks, pieces, p), piece_begin(blocks, pieces, p + 1)};
  }
  job->set_tasks(first_phase + kGateUp, n, tasks);
}

// Decides whether enough experts are active to give each thread whole ones, and cuts them into units: the
// largest first, so that the last ones even out the load.
bool MoeCall::cut_experts() {
  unit_count = 0;
  if (!m.can_go_by_experts()) return false;
  const int64_t threads = m.pool_->threads();
  const int64_t slots = count * top_k;
  const int64_t at_most =
      std::clamp(round_up(ceil_div(slots, threads * kUnitsPerThread), 32), kMinUnitRows, kMaxUnitRows);
  for (int64_t a = 0; a < active_count; ++a) {
    const int64_t n = active[a].count;
    const int64_t pieces = n > at_most + at_most / 4 ? ceil_div(n, at_most) : 1;
    for (int64_t p = 0; p < pieces; ++p) {
      const int64_t tiles = ceil_div(n, 16);
      const int64_t first = 16 * piece_begin(tiles, pieces, p);
      const int64_t end = std::min(n, 16 * piece_begin(tiles, pieces, p + 1));
      units[unit_count++] = Unit{a, active[a].row + first, end - first};
    }
  }
  // One token's experts cost the same: of those that every thread has as many of, nobody waits for anybody
  // between the products. At the end the first waits for the last, unless other work is queued or some are
  // divided: so one more a thread is, in a call that comes alone.
  divided.count = 0;
  const bool one_row_each = count == 1 && active_count == slots;  // no expert is named twice
  if (one_row_each && unit_count >= threads) {
    const bool alike = m.o_.schedule == Schedule::kStatic;  // tasks must be
    divided.count = unit_count % threads;
    if (divided.count > 0 && alike) return false;
    if (divided.count == 0 && !alike && threads > 1 && unit_count > threads && m.pool_->idle())
      divided.count = threads;
    cut_divided();
  } else if (unit_count < threads * kUnitsPerThread) {
    return false;
  } else {  // sorting allocates, which decoding must not
    std::stable_sort(units, units + unit_count,
                     [](const Unit& a, const Unit& b) { return a.count > b.count; });
  }
  std::copy(dst_row, dst_row + slots, token_rows);
  for (int64_t t = 0; t < count; ++t) std::sort(token_rows + t * top_k, token_rows + (t + 1) * top_k);

  // A piece is whole tokens: a phase of one task would only keep the others from the next job.
  const bool serial_sum = count == 1 || slots * m.o_.hidden <= kSerialElements;
  pieces_sum = serial_sum ? 1 : std::min(count, threads * kTasksPerThread);
  job->set_serial(first_phase + kSum, serial_sum);
  job->set_tasks(first_phase + kExperts, 0, unit_count + divided.count * divided.down_pieces);
  job->set_tasks(first_phase + kSum, 0, pieces_sum);
  return true;
}

int64_t MoeCall::most_divided() const { return std::min<int64_t>(m.pool_->threads(), top_k); }

// The last units are cut instead: gate + up and quantising as by columns, in phases of their own that come
// first; down behind the whole experts, where small tasks even out the load.
void MoeCall::cut_divided() {
  unit_count -= divided.count;
  const int64_t width = m.o_.nodes[0].width();
  const auto pieces_of = [&](int64_t blocks, int64_t k) {
    const int64_t cost = block_cost(m.o_.scheme.block_bytes(k), 1);
    const int64_t share = blocks * cost / (m.pool_->threads() * kDividedTasks);
    return pieces_for(blocks, cost, std::clamp(share, kMinTaskCost, kPanelBytes));
  };
  divided.up_pieces = pieces_of(width / 16, m.h_pad_);
  divided.down_pieces = pieces_of(ceil_div(m.o_.hidden, 32), width);
  job->set_tasks(first_phase + kGateUp, 0, divided.count * divided.up_pieces);
  job->set_tasks(first_phase + kQuantizeH, 0, divided.count);
}

}  // namespace ktc
