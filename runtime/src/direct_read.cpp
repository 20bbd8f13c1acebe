#include "direct_read.h"

#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace ktc {
namespace {

constexpr int64_t kPiece = 2 << 20;  // a huge page: touched once, filled by one request
constexpr int kPieces = 8;           // under way at once

/* One context a thread, made at its first read: making and ending one takes the kernel milliseconds. */
class Context {
 public:
  Context() {
    if (syscall(SYS_io_setup, kPieces, &id_) != 0) id_ = 0;
    // Where a sandbox forbids collecting, nothing may be submitted.
    if (id_ != 0 && syscall(SYS_io_getevents, id_, 0, 0, nullptr, nullptr) != 0) {
      syscall(SYS_io_destroy, id_);
      id_ = 0;
    }
  }
  ~Context() {
    if (id_ != 0) syscall(SYS_io_destroy, id_);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  bool works() const { return id_ != 0; }
  bool submit(iocb* piece) { return syscall(SYS_io_submit, id_, 1, &piece) == 1; }

  // Waits for all of `count` pieces. Memory is the kernel's to write to until then, so it does not give up.
  void collect(int count, int64_t* results) {
    io_event done[kPieces];
    while (count > 0) {
      const long got = syscall(SYS_io_getevents, id_, 1, count, done, nullptr);
      for (long i = 0; i < got; ++i) results[done[i].data] = done[i].res;
      if (got > 0) count -= static_cast<int>(got);
    }
  }

 private:
  aio_context_t id_ = 0;
};

}  // namespace

int64_t read_direct(int fd, void* dst, int64_t nbytes, int64_t offset) {
  thread_local Context context;
  if (!context.works()) return pread(fd, dst, nbytes, offset);

  iocb pieces[kPieces] = {};
  int64_t results[kPieces];
  int count = 0;
  for (int64_t at = 0; at < nbytes && count < kPieces; at += kPiece, ++count) {
    iocb& piece = pieces[count];
    piece.aio_data = static_cast<uint64_t>(count);
    piece.aio_lio_opcode = IOCB_CMD_PREAD;
    piece.aio_fildes = static_cast<uint32_t>(fd);
    piece.aio_buf = reinterpret_cast<uintptr_t>(dst) + static_cast<uint64_t>(at);
    piece.aio_nbytes = static_cast<uint64_t>(std::min(kPiece, nbytes - at));
    piece.aio_offset = offset + at;
    if (!context.submit(&piece)) break;
  }
  if (count == 0) return pread(fd, dst, nbytes, offset);  // refused: it says why
  context.collect(count, results);

  int64_t got = 0;
  for (int i = 0; i < count; ++i) {
    if (results[i] < 0 && got == 0) {
      errno = static_cast<int>(-results[i]);
      return -1;
    }
    got += std::max<int64_t>(results[i], 0);
    if (results[i] < static_cast<int64_t>(pieces[i].aio_nbytes)) break;
  }
  return got;
}

}  // namespace ktc
