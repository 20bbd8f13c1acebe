#include "graph/mailbox.h"

#include <exception>

#include "graph/executor.h"

namespace ktc::graph {

void Mailbox::finish_linears() {
  std::exception_ptr first;
  while (!linears.empty()) {
    const LinearTicket ticket = linears.back();
    linears.pop_back();
    try {
      ticket.linear->wait(ticket.id);
    } catch (const std::runtime_error& error) {
      first = std::make_exception_ptr(NodeError(*ticket.name, error.what()));
    } catch (...) {
      first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

void Mailbox::drain() noexcept {
  while (!linears.empty()) {
    const LinearTicket ticket = linears.back();
    linears.pop_back();
    try {
      ticket.linear->wait(ticket.id);
    } catch (...) {  // the first error is already on its way to the caller
    }
  }
  for (Ticket* t : {&immediate, &deferred, &posted}) {
    if (!*t) continue;
    const Ticket ticket = *t;
    *t = {};
    try {
      std::vector<float> sink(static_cast<size_t>(ticket.rows * ticket.experts->hidden));
      ticket.experts->collect(ticket.id, sink.data(), ticket.rows);
    } catch (...) {  // as above
    }
  }
}

}  // namespace ktc::graph
