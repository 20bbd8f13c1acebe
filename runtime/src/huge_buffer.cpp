#include "huge_buffer.h"

#include <fcntl.h>
#include <linux/mempolicy.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <stdexcept>
#include <vector>

#include "cpu.h"
#include "direct_read.h"

namespace ktc {
namespace {

constexpr int64_t kChunk = 8 << 20;     // whole huge pages, so that one thread touches each of them first
constexpr int64_t kDirectAlign = 4096;  // of memory, offset and size of a direct read

// The id of a node of numa_nodes(); -1 where there is nothing to choose between.
int id_of(int node) {
  const std::vector<NumaNode> nodes = numa_nodes();
  return node < 0 || nodes.size() < 2 || node >= static_cast<int>(nodes.size()) ? -1 : nodes[node].id;
}

// Empty, or why the memory stays unbound.
std::string bind_to_node(void* data, int64_t nbytes, int id) {
  constexpr int kBits = 8 * sizeof(unsigned long);
  std::vector<unsigned long> mask(id / kBits + 1, 0);
  mask[id / kBits] |= 1ul << (id % kBits);
  // The kernel reads one bit fewer than it is told.
  if (syscall(SYS_mbind, data, nbytes, MPOL_BIND, mask.data(), mask.size() * kBits + 1, 0) == 0) return "";
  return std::string("cannot bind memory to NUMA node ") + std::to_string(id) + ": " + std::strerror(errno) +
         "; it goes where the reading threads are (a container needs CAP_SYS_NICE to bind)";
}

class File {
 public:
  explicit File(const std::string& path, int flags = 0)
      : fd_(open(path.c_str(), O_RDONLY | O_CLOEXEC | flags)) {}
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  int fd() const { return fd_; }

 private:
  int fd_;
};

struct Read {
  const std::string* path;
  int fd;
  int direct_fd;  // the same file past the page cache; -1 where that cannot be
  uint8_t* dst;
  int64_t file_offset, nbytes;
  std::vector<std::pair<int64_t, int64_t>> ranges;  // chunks [first, last) of each pool node
  int64_t head;                                     // bytes before the first chunk boundary
};

std::runtime_error read_error(const std::string& path, int64_t offset, const std::string& reason) {
  return std::runtime_error(path + ": " + reason + " at offset " + std::to_string(offset));
}

/* Where the file ends, so that the message is the same whichever chunk beyond the end was read first. */
int64_t file_end(int fd, int64_t at) {
  struct stat st;
  return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) ? std::min<int64_t>(at, st.st_size) : at;
}

// Whether the page at `offset` is in the page cache already. Not sure counts as yes.
bool is_cached(int fd, int64_t offset) {
  char page[kDirectAlign];
  iovec to{page, sizeof page};
  return preadv2(fd, &to, 1, offset, RWF_NOWAIT) >= 0 || errno != EAGAIN;
}

void read_chunk(void* context, const Task& task) {
  const Read& r = *static_cast<const Read*>(context);
  const int64_t chunk = r.ranges[task.node].first + task.index;
  int64_t at = chunk == 0 ? 0 : r.head + (chunk - 1) * kChunk;
  const int64_t end = std::min(r.nbytes, r.head + chunk * kChunk);
  // A file that is not cached is read past the cache: half the copying, and memory is not filled twice with
  // weights.
  const bool fits = (reinterpret_cast<uintptr_t>(r.dst) + at) % kDirectAlign == 0 &&
                    (r.file_offset + at) % kDirectAlign == 0;
  bool direct = r.direct_fd >= 0 && fits && !is_cached(r.fd, r.file_offset + at);
  while (at < end) {
    const int64_t whole = (end - at) / kDirectAlign * kDirectAlign;
    direct = direct && whole > 0;
    const int64_t got = direct ? read_direct(r.direct_fd, r.dst + at, whole, r.file_offset + at)
                               : pread(r.fd, r.dst + at, end - at, r.file_offset + at);
    if (got < 0 && errno == EINTR) continue;
    // Not possible here, or the file ends: the other way says what is wrong.
    if (direct && (got <= 0 || got % kDirectAlign != 0)) {
      direct = false;
      continue;
    }
    if (got < 0)
      throw read_error(*r.path, r.file_offset + at, std::string("read failed: ") + std::strerror(errno));
    if (got == 0) throw read_error(*r.path, file_end(r.fd, r.file_offset + at), "file ends too early");
    at += got;
  }
}

}  // namespace

HugeBuffer::HugeBuffer(int64_t nbytes, int node) : nbytes_(nbytes), node_(node) {
  if (nbytes < 0) throw std::invalid_argument("negative buffer size");
  mapping_ = Mapping(nbytes);
  if (nbytes > 0) node_id_ = id_of(node);
  if (node_id_ >= 0) bind_warning_ = bind_to_node(mapping_.data(), mapping_.size(), node_id_);
}

void HugeBuffer::read_file(const std::string& path, int64_t file_offset, int64_t nbytes, int64_t dst_offset,
                           Pool& pool) {
  if (nbytes < 0 || file_offset < 0 || dst_offset < 0 || nbytes > nbytes_ - dst_offset)
    throw std::invalid_argument("read of " + std::to_string(nbytes) + " bytes at " +
                                std::to_string(dst_offset) + " does not fit a buffer of " +
                                std::to_string(nbytes_));
  if (!bind_warning_.empty()) pool.warn(bind_warning_);
  const File file(path);
  if (file.fd() < 0) throw read_error(path, file_offset, std::string("cannot open: ") + std::strerror(errno));
  if (nbytes == 0) return;

  const File direct(path, O_DIRECT);
  if (direct.fd() >= 0)
    posix_fadvise(file.fd(), 0, 0, POSIX_FADV_RANDOM);  // is_cached must not start a readahead
  Read read{&path, file.fd(), direct.fd(), mapping_.data() + dst_offset, file_offset, nbytes, {}, 0};
  read.head = std::min(nbytes, kChunk - dst_offset % kChunk);
  const int64_t chunks = 1 + (nbytes - read.head + kChunk - 1) / kChunk;
  Job* job = pool.acquire();
  try {
    job->reset(nullptr, Schedule::kDynamic, 0);
    const int phase = job->add_phase(&read_chunk, &read);
    const int nodes = pool.nodes();
    for (int i = 0; i < nodes; ++i) {
      std::pair<int64_t, int64_t> range{chunks * i / nodes, chunks * (i + 1) / nodes};
      if (node_ >= 0)
        range = i == node_ % nodes ? std::make_pair<int64_t>(0, int64_t{chunks})
                                   : std::pair<int64_t, int64_t>{0, 0};
      read.ranges.push_back(range);
      job->set_tasks(phase, i, range.second - range.first);
    }
    pool.submit(job);
    pool.wait(job);
  } catch (...) {
    pool.release(job);
    throw;
  }
  pool.release(job);
}

int64_t HugeBuffer::huge_bytes() const {
  if (mapping_.size() == 0) return 0;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(mapping_.data()), end = begin + mapping_.size();
  std::ifstream smaps("/proc/self/smaps");
  int64_t total = 0;
  bool inside = false;
  for (std::string line; std::getline(smaps, line);) {
    unsigned long first = 0, last = 0;
    long kb = 0;
    if (std::sscanf(line.c_str(), "%lx-%lx ", &first, &last) == 2) {
      inside = first < end && last > begin;
    } else if (inside && std::sscanf(line.c_str(), "AnonHugePages: %ld kB", &kb) == 1) {
      total += kb * 1024;
    }
  }
  return std::min<int64_t>(total, mapping_.size());  // a neighbour may share the kernel's range
}

}  // namespace ktc
