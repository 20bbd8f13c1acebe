#include "graph/pool_adapter.h"

#include <atomic>
#include <stdexcept>

#include "pool.h"

namespace ktc::graph {

namespace {

constexpr int kMaxNodes = 128;

struct Call {
  void (*fn)(void*, int64_t, int);
  void* arg;
  uint64_t id;
  std::atomic<int> next_thread{0};
  int64_t base[kMaxNodes];  // first task of each node
};

// A number for each thread that takes part in a call, dense from 0: threads index scratch with it.
int thread_of(Call& call) {
  thread_local uint64_t t_call = 0;
  thread_local int t_index = 0;
  if (t_call != call.id) {
    t_call = call.id;
    t_index = call.next_thread.fetch_add(1, std::memory_order_relaxed);
  }
  return t_index;
}

void run_task(void* context, const Task& task) {
  Call& call = *static_cast<Call*>(context);
  call.fn(call.arg, call.base[task.node] + task.index, thread_of(call));
}

class JobHandle {
 public:
  explicit JobHandle(Pool& pool) : pool_(pool), job_(pool.acquire()) {}
  ~JobHandle() { pool_.release(job_); }
  JobHandle(const JobHandle&) = delete;
  JobHandle& operator=(const JobHandle&) = delete;
  Job* operator->() const { return job_; }
  Job* get() const { return job_; }

 private:
  Pool& pool_;
  Job* job_;
};

void run(void* opaque, int64_t tasks, void (*fn)(void*, int64_t, int), void* arg) {
  static std::atomic<uint64_t> calls{0};
  Pool& pool = *static_cast<Pool*>(opaque);
  Call call;
  call.fn = fn;
  call.arg = arg;
  call.id = calls.fetch_add(1, std::memory_order_relaxed) + 1;
  JobHandle job(pool);
  job->reset(nullptr, Schedule::kDynamic, 0);  // no library: threads keep the tile state that they have
  const int phase = job->add_phase(run_task, &call);
  int threads = 0;
  for (int node = 0; node < pool.nodes(); ++node) {
    const int64_t begin = tasks * threads / pool.threads();
    threads += pool.node_threads(node);
    call.base[node] = begin;
    job->set_tasks(phase, node, tasks * threads / pool.threads() - begin);
  }
  pool.submit(job.get());
  pool.wait(job.get());
}

}  // namespace

ops::Parallel make_parallel(Pool* pool) {
  if (pool == nullptr) return {};
  if (pool->nodes() > kMaxNodes) throw std::invalid_argument("more than 128 NUMA nodes");
  return {pool, run, pool->threads()};
}

}  // namespace ktc::graph
