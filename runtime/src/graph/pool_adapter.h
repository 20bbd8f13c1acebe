// The operators' view of the runtime's thread pool.
#pragma once

#include "ops/parallel.h"

namespace ktc {
class Pool;
}

namespace ktc::graph {

// `pool` must outlive the result. Null gives a serial one.
ops::Parallel make_parallel(Pool* pool);

}  // namespace ktc::graph
