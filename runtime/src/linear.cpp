#include "linear.h"

#include <algorithm>
#include <stdexcept>

#include "splitting.h"

namespace ktc {
namespace {

constexpr int64_t kRowChunk = 4096;  // rows whose packed activations are held at once

}  // namespace

struct Linear::Call {
  const Linear* linear;
  const float* x;
  float* y;
  int64_t ld_x, ld_y, rows;
  int64_t quantize_pieces, block_pieces, row_pieces;
  int nodes;
  ktc_act act;
};

Linear::Linear(std::shared_ptr<KernelLib> lib, std::shared_ptr<Pool> pool, int64_t n, int64_t k,
               const Scheme& scheme, const ktc_weight& weight, const std::string& force,
               const MinRows& min_rows)
    : lib_(std::move(lib)),
      pool_(std::move(pool)),
      n_(n),
      k_(k),
      k_pad_(round_up(k, 64)),
      blocks_(ceil_div(n, 32)),
      scheme_(scheme),
      weight_(weight),
      kernels_(*lib_, scheme, KTC_STORE, k_pad_, force, min_rows) {
  if (n < 1 || k < 1) throw std::invalid_argument("a linear needs n >= 1 and k >= 1");
  if (weight.tiles == nullptr || reinterpret_cast<uintptr_t>(weight.tiles) % 64 != 0)
    throw std::invalid_argument("tiles must be 64-byte aligned and not null");
  if (scheme.integer() && weight.scale == nullptr)
    throw std::invalid_argument("an integer format needs scales");
  if (scheme.has_mult() && weight.mult == nullptr)
    throw std::invalid_argument(std::string(scale_name(scheme.scale)) + " scales need multipliers");
}

void Linear::forward(const float* x, int64_t ld_x, int64_t m, float* y, int64_t ld_y) {
  wait(submit(x, ld_x, m, y, ld_y));
}

Job* Linear::submit(const float* x, int64_t ld_x, int64_t m, float* y, int64_t ld_y) {
  if (m < 0) throw std::invalid_argument("negative row count");
  if (m == 0) return nullptr;
  const int64_t chunks = ceil_div(m, kRowChunk);
  const int64_t max_rows = round_up(std::min(m, kRowChunk), 16);
  const int64_t tile_bytes = max_rows / 16 * scheme_.steps(k_pad_) * 1024;
  const int64_t sums = scheme_.integer() ? max_rows * scheme_.act_groups(k_pad_) : 0;
  const int64_t scales = scheme_.integer() ? max_rows : 0;

  Job* job = pool_->acquire();
  try {
    job->reset(lib_->raw(), Schedule::kDynamic, kernels_.scratch_bytes());
    job->arena.reserve(Arena::bytes_for<Call>(chunks) + Arena::bytes_for<uint8_t>(tile_bytes) +
                       Arena::bytes_for<int32_t>(sums) + Arena::bytes_for<float>(scales));
    Call* calls = job->arena.take<Call>(chunks);
    ktc_act act{};
    act.tiles = job->arena.take<uint8_t>(tile_bytes);
    act.scale = job->arena.take<float>(scales);
    act.sums = job->arena.take<int32_t>(sums);
    for (int64_t c = 0; c < chunks; ++c) {
      const int64_t first = c * kRowChunk;
      calls[c] = Call{};
      calls[c].linear = this;
      calls[c].x = x + first * ld_x;
      calls[c].y = y + first * ld_y;
      calls[c].ld_x = ld_x;
      calls[c].ld_y = ld_y;
      calls[c].rows = std::min(kRowChunk, m - first);
      calls[c].nodes = pool_->nodes();
      calls[c].act = act;
      const int quantize_phase = job->add_phase(&quantize_task, &calls[c]);
      const int gemm_phase = job->add_phase(&gemm_task, &calls[c]);
      plan_chunk(calls[c], *job, quantize_phase, gemm_phase);
    }
    pool_->submit(job);
  } catch (...) {
    pool_->release(job);
    throw;
  }
  return job;
}

void Linear::wait(Job* job) {
  if (job == nullptr) return;
  try {
    pool_->wait(job);
  } catch (...) {
    pool_->release(job);
    throw;
  }
  pool_->release(job);
}

void Linear::plan_chunk(Call& call, Job& job, int quantize_phase, int gemm_phase) {
  const int64_t threads = pool_->threads();
  const bool serial = call.rows * k_ <= kSerialElements;
  call.quantize_pieces = serial ? 1 : std::min(call.rows, threads * 4);
  job.set_serial(quantize_phase, serial);

  const int64_t block_bytes = scheme_.block_bytes(k_pad_);
  const int64_t cost = block_cost(block_bytes, call.rows);
  const int64_t target = std::max(blocks_ * cost / (threads * kTasksPerThread), kMinTaskCost);
  const int64_t l2_pieces = std::min(blocks_, ceil_div(blocks_ * block_bytes, kPanelBytes));
  call.block_pieces = pieces_for(blocks_, cost, target);
  if (call.rows <= kFewRows) {
    const int64_t long_calls = long_pieces(blocks_ * block_bytes, kFewRowsBytes, threads);
    call.block_pieces = std::min({call.block_pieces, long_calls, threads * kFewRowsTasks});
  }
  call.block_pieces = std::max(call.block_pieces, l2_pieces);
  // Few columns but many rows (a small output layer in a long prefill): share the rows too.
  const int64_t row_units = ceil_div(call.rows, 32);
  call.row_pieces = std::clamp<int64_t>(blocks_ * cost / (call.block_pieces * target), 1, row_units);

  for (int node = 0; node < call.nodes; ++node) {
    const int64_t tasks = call.block_pieces * call.row_pieces;
    job.set_tasks(quantize_phase, node,
                  share_begin(call.quantize_pieces, node + 1, call.nodes) -
                      share_begin(call.quantize_pieces, node, call.nodes));
    job.set_tasks(gemm_phase, node,
                  share_begin(tasks, node + 1, call.nodes) - share_begin(tasks, node, call.nodes));
  }
  kernels_.count(call.rows);
}

void Linear::quantize_task(void* context, const Task& task) {
  const Call& call = *static_cast<const Call*>(context);
  const Linear& self = *call.linear;
  const int64_t piece = share_begin(call.quantize_pieces, task.node, call.nodes) + task.index;
  ktc_quant_args args{};
  args.struct_size = sizeof args;
  args.k_valid = self.k_;
  args.k = self.k_pad_;
  args.m_begin = piece_begin(call.rows, call.quantize_pieces, piece);
  args.m_end = piece_begin(call.rows, call.quantize_pieces, piece + 1);
  args.x = call.x;
  args.ld_x = call.ld_x;
  args.copies = 1;
  args.act = call.act;
  check_kernel(self.kernels_.quantize()(&args), "quantize");
}

void Linear::gemm_task(void* context, const Task& task) {
  const Call& call = *static_cast<const Call*>(context);
  const Linear& self = *call.linear;
  const int64_t tasks = call.block_pieces * call.row_pieces;
  const int64_t piece = share_begin(tasks, task.node, call.nodes) + task.index;
  const int64_t block_piece = piece / call.row_pieces, row_piece = piece % call.row_pieces;
  const int64_t row_units = ceil_div(call.rows, 32);
  const ktc_gemm_kernel& kernel = self.kernels_.pick(call.rows);
  ktc_gemm_args args{};
  args.struct_size = sizeof args;
  args.k = self.k_pad_;
  args.m_begin = 32 * piece_begin(row_units, call.row_pieces, row_piece);
  args.m_end = std::min(call.rows, 32 * piece_begin(row_units, call.row_pieces, row_piece + 1));
  args.block_begin = piece_begin(self.blocks_, call.block_pieces, block_piece);
  args.block_end = piece_begin(self.blocks_, call.block_pieces, block_piece + 1);
  args.n_out = self.n_;
  args.act = call.act;
  args.weight = self.weight_;
  args.out = call.y;
  args.ld_out = call.ld_y;
  args.scratch = task.scratch;
  check_kernel(kernel.gemm(&args), kernel.name);
}

}  // namespace ktc
