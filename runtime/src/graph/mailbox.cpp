#include "graph/mailbox.h"

#include <exception>

#include "graph/executor.h"

namespace ktc::graph {

void Mailbox::finish_linears() {
  std::exception_ptr first;
  for (size_t before = 0; !linears.empty(); ++before) {
    const LinearTicket ticket = linears.back();
    linears.pop_back();
    try {
      ticket.linear->wait(ticket.id);
    } catch (const std::runtime_error& error) {
      first = before == 0 ? std::current_exception()
                          : std::make_exception_ptr(EarlierNodeError(before, error.what()));
    } catch (...) {
      first = std::current_exception();
    }
  }
  if (first) std::rethrow_exception(first);
}

void Mailbox::drain() noexcept {
  try {
    finish_linears();
  } catch (...) {  // the first error is already on its way to the caller
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
