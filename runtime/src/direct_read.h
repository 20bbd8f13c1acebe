#pragma once

#include <cstdint>

namespace ktc {

/*
 * pread(2) of an O_DIRECT file in pieces that are all under way at once: while the disk fills one piece, this
 * thread touches the pages of the next (a page of fresh memory has to be found and zeroed, and on a virtual
 * machine perhaps given back by the host, before the disk may write to it).
 *
 * fd: opened with O_DIRECT; dst, offset and nbytes: aligned as O_DIRECT asks. Bytes read from `offset` on
 * without a gap, fewer than nbytes at the end of the file or before an error; -1 with errno where not even
 * the first piece could be read. Where the system forbids asynchronous reads (io_setup(2)), this is pread.
 */
int64_t read_direct(int fd, void* dst, int64_t nbytes, int64_t offset);

}  // namespace ktc
