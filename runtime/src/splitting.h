// How work is cut into tasks: one place for the numbers that tuning will change.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ktc {

// Tasks per thread that dynamic scheduling wants, so that the last ones even out the load.
constexpr int64_t kTasksPerThread = 8;
// Weight bytes of one task at most: they stay in L2 while the rows pass over them.
constexpr int64_t kPanelBytes = 1 << 20;
// Weight bytes of one kernel call at least, where that leaves a task for each thread.
constexpr int64_t kCallBytes = 256 << 10;
// The same where few experts are left over, behind which whole ones follow: a call of the kernel begins
// slowly.
constexpr int64_t kDividedTasks = 2;
// A linear with so few rows takes as long as its weights take to arrive: so many tasks a thread at most, and
// weight bytes of each at least, where that leaves a task for each thread.
constexpr int64_t kFewRows = 16, kFewRowsTasks = 2, kFewRowsBytes = 64 << 10;
// Cost (bytes read, see block_cost) below which a task is not worth sharing.
constexpr int64_t kMinTaskCost = 32 << 10;
// Elements that one thread converts faster than others could be woken.
constexpr int64_t kSerialElements = 32 << 10;
// Rows after which multiplying a weight block costs as much again as reading it.
constexpr int64_t kRowsPerRead = 64;

// By experts (moe_call.h): units that each thread must get before experts are given out whole, and rows of
// one unit: fewer would read its weights too often, more would not leave them room in L2.
constexpr int64_t kUnitsPerThread = 4;
constexpr int64_t kMinUnitRows = 64, kMaxUnitRows = 512;

// Cost of one 32-row weight block for `rows` rows of activations, in bytes read.
constexpr int64_t block_cost(int64_t block_bytes, int64_t rows) {
  return block_bytes + block_bytes * rows / kRowsPerRead;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Piece `i` of `pieces` of [0, total): begins at total * i / pieces.
constexpr int64_t piece_begin(int64_t total, int64_t pieces, int64_t i) { return total * i / pieces; }

// Pieces for `units` indivisible units of `unit_cost` each, when tasks should cost about `target`.
inline int64_t pieces_for(int64_t units, int64_t unit_cost, int64_t target) {
  return std::clamp<int64_t>(ceil_div(units * unit_cost, std::max<int64_t>(target, 1)), 1, units);
}

// Pieces of `bytes` in all with `least` each or more, as many for every thread, at least one.
inline int64_t long_pieces(int64_t bytes, int64_t least, int64_t threads) {
  return std::max<int64_t>(bytes / least / threads, 1) * threads;
}

// Floats between rows of `n` floats in scratch: an odd number of cache lines, so that a column of many rows
// does not fall into a few sets of a cache.
constexpr int64_t row_stride(int64_t n) { return (ceil_div(n, 16) | 1) * 16; }

// Half-open share of node `node` when `total` tasks that any node may run are dealt out.
constexpr int64_t share_begin(int64_t total, int node, int nodes) { return total * node / nodes; }

}  // namespace ktc
