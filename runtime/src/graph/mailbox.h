// What a step has begun and not yet waited for.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace ktc::graph {

struct Experts;
struct PackedLinear;

// What failed in a node before the one that was waiting for it.
struct EarlierNodeError : std::runtime_error {
  EarlierNodeError(size_t nodes, const char* what) : std::runtime_error(what), nodes_before(nodes) {}
  const size_t nodes_before;
};

// Outstanding tickets of a step: the current layer's immediate experts, the deferred experts of the last MoE
// layer, which the next one's collect adds, and linears that run together. Drained if a step fails.
struct Mailbox {
  struct Ticket {
    Experts* experts = nullptr;
    int64_t id = 0, rows = 0;
    explicit operator bool() const { return experts != nullptr; }
  };
  Ticket immediate;
  Ticket deferred;           // of an earlier layer, due at the next collect
  Ticket posted;             // deferred by the current layer, due one collect later
  std::vector<int64_t> ids;  // slots sorted by weight, [rows][top_k]
  std::vector<float> weights;
  std::vector<float> scratch;  // [hidden]: a deferred row

  struct LinearTicket {
    PackedLinear* linear = nullptr;
    void* id = nullptr;
  };
  std::vector<LinearTicket> linears;  // of consecutive nodes over the same rows, in their order

  // Waits for the linears, the last one first: until it is done its waiter takes tasks of all. Rethrows the
  // first one's exception, as an EarlierNodeError if it is a runtime_error of another node than the last.
  void finish_linears();
  // Collects and drops whatever is outstanding; never throws.
  void drain() noexcept;
};

}  // namespace ktc::graph
