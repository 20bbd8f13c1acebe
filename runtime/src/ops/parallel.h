// How an operator spreads its tasks over threads: a pool behind two pointers, so that operators know no pool.
#pragma once

#include <cstdint>

namespace ktc::ops {

struct Parallel {
  void* pool = nullptr;
  // Runs fn(arg, task, thread) for every task in [0, tasks), thread in [0, threads); returns when all are
  // done.
  void (*run)(void* pool, int64_t tasks, void (*fn)(void*, int64_t, int), void* arg) = nullptr;
  int threads = 1;
};

// `serial` keeps small work on the caller: a handoff costs about as much as 10k multiply-adds.
template <class F>
void parallel_for(const Parallel& p, int64_t tasks, bool serial, F&& f) {
  if (serial || tasks <= 1 || p.run == nullptr || p.threads <= 1) {
    for (int64_t i = 0; i < tasks; ++i) f(i, 0);
    return;
  }
  p.run(
      p.pool, tasks, [](void* arg, int64_t task, int thread) { (*static_cast<F*>(arg))(task, thread); }, &f);
}

// The same over a range cut into pieces of at least `grain`.
template <class F>
void parallel_range(const Parallel& p, int64_t count, int64_t grain, F&& f) {
  const int64_t most = 4 * static_cast<int64_t>(p.threads);
  int64_t pieces = (count + grain - 1) / (grain > 0 ? grain : 1);
  pieces = pieces > most ? most : pieces;
  if (pieces <= 1) {
    if (count > 0) f(static_cast<int64_t>(0), count, 0);
    return;
  }
  parallel_for(p, pieces, false, [&](int64_t i, int thread) {
    const int64_t begin = count * i / pieces, end = count * (i + 1) / pieces;
    if (begin < end) f(begin, end, thread);
  });
}

}  // namespace ktc::ops
