#include "graph/table_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>
#include <vector>

#include "graph/executor.h"

namespace ktc::graph {

namespace {

int64_t file_size(int fd) {
  struct stat st;
  return fstat(fd, &st) == 0 ? st.st_size : 0;
}

// Rows are widened one at a time by the operator that also reads a table in memory: the same bits.
class EmbedFile final : public Node {
 public:
  EmbedFile(const NodeSpec& s, Executor& e)
      : out_(s.outputs.at(0)), table_(s.table), scale_(static_cast<float>(s.param("scale", 1.0))) {
    if (table_->rows() < e.options().vocab || 4 * table_->cols() != e.row_bytes(out_))
      throw std::invalid_argument(s.op + " node '" + s.name + "': a table of " +
                                  std::to_string(table_->rows()) + " rows of " +
                                  std::to_string(table_->cols()) + " does not fit the program");
    row_.resize(static_cast<size_t>(table_->row_bytes()));
    wanted_.reserve(static_cast<size_t>(e.max_rows()));
  }

  void run(const Step& st) override {
    if (st.rows > 1) prefetch(st.ids, st.rows);
    const int64_t first = 0, cols = table_->cols();
    float* const y = st.at(out_);
    for (int64_t r = 0; r < st.rows; ++r) {
      table_->read(st.ids[r], row_.data());
      st.table->embed(&first, 0, 1, {row_.data(), table_->dtype(), cols}, cols, scale_, y + r * cols);
    }
  }

 private:
  // Of a whole chunk, so that the disk has many requests at once.
  void prefetch(const int64_t* ids, int64_t count) {
    wanted_.assign(ids, ids + count);
    std::sort(wanted_.begin(), wanted_.end());
    const auto end = std::unique(wanted_.begin(), wanted_.end());
    std::for_each(wanted_.begin(), end, [this](int64_t row) { table_->will_need(row); });
  }

  int out_;
  std::shared_ptr<const TableFile> table_;
  float scale_;
  std::vector<char> row_;        // as stored
  std::vector<int64_t> wanted_;  // room for a chunk: a step allocates nothing
};

}  // namespace

TableFile::TableFile(std::string path, std::string tensor, int64_t offset, ops::DType dtype, int64_t rows,
                     int64_t cols)
    : path_(std::move(path)),
      tensor_(std::move(tensor)),
      offset_(offset),
      dtype_(dtype),
      rows_(rows),
      cols_(cols),
      fd_(open(path_.c_str(), O_RDONLY | O_CLOEXEC)) {
  if (fd_ < 0) throw std::runtime_error(path_ + ": cannot open: " + std::strerror(errno));
  const int64_t size = file_size(fd_);
  if (offset < 0 || rows < 1 || cols < 1 || size < offset || (size - offset) / row_bytes() < rows) {
    close(fd_);
    throw std::runtime_error(path_ + ": file ends too early for " + tensor_ + ", at offset " +
                             std::to_string(size));
  }
  posix_fadvise(fd_, 0, 0, POSIX_FADV_RANDOM);  // a row must not start a readahead
}

TableFile::~TableFile() { close(fd_); }

void TableFile::will_need(int64_t row) const {
  posix_fadvise(fd_, offset_ + row * row_bytes(), row_bytes(), POSIX_FADV_WILLNEED);  // advice: may fail
}

void TableFile::read(int64_t row, void* dst) const {
  const int64_t begin = offset_ + row * row_bytes();
  for (int64_t at = 0; at < row_bytes();) {
    const int64_t got =
        pread(fd_, static_cast<char*>(dst) + at, static_cast<size_t>(row_bytes() - at), begin + at);
    if (got > 0) {
      at += got;
      continue;
    }
    if (got < 0 && errno == EINTR) continue;
    const std::string why =
        got < 0 ? std::strerror(errno) : "the file ends at offset " + std::to_string(file_size(fd_));
    throw std::runtime_error(path_ + ": cannot read row " + std::to_string(row) + " of " + tensor_ + ": " +
                             why);
  }
}

std::unique_ptr<Node> make_embed_file(const NodeSpec& spec, Executor& executor) {
  return std::make_unique<EmbedFile>(spec, executor);
}

}  // namespace ktc::graph
