// Weight memory: 2 MB-aligned, advised huge, on one NUMA node, filled by that node's threads.
#pragma once

#include <cstdint>
#include <string>

#include "arena.h"
#include "pool.h"

namespace ktc {

class HugeBuffer {
 public:
  // `node` counts the nodes of numa_nodes(); -1 = anywhere. A node that the machine does not have
  // (emulated nodes) is not bound. Throws std::bad_alloc, std::invalid_argument.
  HugeBuffer(int64_t nbytes, int node);

  uint8_t* data() const { return mapping_.data(); }
  int64_t size() const { return nbytes_; }
  // The node that the pages belong on, as in /sys/devices/system/node; -1 = anywhere. Whether they are there
  // is for /proc/self/numa_maps to say: binding may be forbidden.
  int node_id() const { return node_id_; }

  // Parallel pread into [dst_offset, dst_offset + nbytes). Throws std::runtime_error naming the file
  // and the offset for a short read or an I/O error.
  void read_file(const std::string& path, int64_t file_offset, int64_t nbytes, int64_t dst_offset,
                 Pool& pool);

  // Bytes of this buffer in huge pages now, from /proc/self/smaps.
  int64_t huge_bytes() const;
  void close() { mapping_ = Mapping(), nbytes_ = 0; }

 private:
  Mapping mapping_;
  int64_t nbytes_;
  int node_, node_id_ = -1;
  std::string bind_warning_;  // handed to the pool that reads
};

}  // namespace ktc
