// Python bindings of the emulated device lane; ktc/emulate/lane.py is what calls them.
#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <tuple>

#include "emulate.h"
#include "graph/bindings_graph.h"

namespace py = pybind11;
using namespace py::literals;

namespace ktc {
namespace {

using emulate::Lane;
using Logits = py::array_t<float, py::array::c_style>;
using BlockTuple = std::tuple<int64_t, int64_t, int, int, int, int, int64_t, int64_t>;
using TimesTuple = std::tuple<int64_t, int64_t, int64_t>;

std::shared_ptr<Lane> make_lane(std::shared_ptr<graph::Executor> executor, std::shared_ptr<Pool> pool,
                                const std::vector<BlockTuple>& blocks) {
  std::vector<emulate::Block> list;
  for (const auto& [submit, collect, x, weights, ids, y, top_k, hidden] : blocks)
    list.push_back({submit, collect, x, weights, ids, y, top_k, hidden});
  return std::make_shared<Lane>(std::move(executor), std::move(pool), std::move(list));
}

int64_t record(Lane& lane, int64_t id, int64_t position, Logits& logits) {
  float* const out = logits.mutable_data();
  py::gil_scoped_release release;
  return lane.record(id, position, out);
}

// Moments and job times as arrays of int64: a step has hundreds of them.
py::dict replay(Lane& lane, int64_t number) {
  emulate::Replay r;
  {
    py::gil_scoped_release release;
    r = lane.replay(number);
  }
  py::array_t<int64_t> blocks({static_cast<py::ssize_t>(r.blocks.size()), py::ssize_t{8}});
  for (size_t i = 0; i < r.blocks.size(); ++i) {
    const emulate::Moments& m = r.blocks[i];
    const int64_t row[] = {m.begin,       m.submit_due,    m.submit_begin, m.submit_end,
                           m.collect_due, m.collect_begin, m.collect_end,  m.jobs};
    std::copy(std::begin(row), std::end(row), blocks.mutable_data(static_cast<py::ssize_t>(i), 0));
  }
  py::array_t<int64_t> jobs({static_cast<py::ssize_t>(r.jobs.size()), py::ssize_t{4}});
  for (size_t i = 0; i < r.jobs.size(); ++i) {
    const Pool::JobTimes& j = r.jobs[i];
    const int64_t row[] = {j.submitted, j.begun, j.done, j.busy};
    std::copy(std::begin(row), std::end(row), jobs.mutable_data(static_cast<py::ssize_t>(i), 0));
  }
  return py::dict("blocks"_a = blocks, "jobs"_a = jobs, "end"_a = r.end, "differing"_a = r.differing,
                  "lane_cpu"_a = r.lane_cpu, "realtime"_a = r.realtime);
}

py::array_t<int64_t> time_jobs(Lane& lane, int64_t number) {
  std::vector<int64_t> times;
  {
    py::gil_scoped_release release;
    times = lane.time_jobs(number);
  }
  return py::array_t<int64_t>(static_cast<py::ssize_t>(times.size()), times.data());
}

}  // namespace

void bind_emulate(py::module_& m) {
  py::class_<Lane, std::shared_ptr<Lane>>(m, "EmulatedLane")
      .def(py::init(&make_lane), "executor"_a, "pool"_a, "blocks"_a)
      .def(
          "set_times",
          [](Lane& lane, const std::vector<TimesTuple>& times, int64_t tail) {
            std::vector<emulate::Times> list;
            for (const auto& [before, between, after] : times) list.push_back({before, between, after});
            lane.set_times(std::move(list), tail);
          },
          "times"_a, "tail"_a)
      .def("record", &record, "token"_a, "position"_a, "logits"_a)
      .def("replay", &replay, "number"_a)
      .def("time_jobs", &time_jobs, "number"_a)
      .def("forget", &Lane::forget)
      .def_property_readonly("recorded", &Lane::recorded);
}

}  // namespace ktc
