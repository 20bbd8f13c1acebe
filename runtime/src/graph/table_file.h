// An embedding table that stays in its file: a step reads the rows that it looks up, by pread(2).
//
// A decode step needs one row of a table of gigabytes, so the table is not worth its memory nor the time to
// read it. The page cache keeps the rows in use; a mapping would do that too, but a file that has become
// shorter must be an error and not a SIGBUS.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "ops/ops.h"

namespace ktc::graph {

// Open as long as it lives, so that the file may be moved or removed meanwhile.
class TableFile {
 public:
  // The table [rows, cols] begins at `offset`. Throws std::runtime_error, naming file and tensor, if the file
  // cannot be opened or ends before the table does.
  TableFile(std::string path, std::string tensor, int64_t offset, ops::DType dtype, int64_t rows,
            int64_t cols);
  ~TableFile();
  TableFile(const TableFile&) = delete;
  TableFile& operator=(const TableFile&) = delete;

  // Asks the kernel to bring a row into the page cache, and does not wait for it.
  void will_need(int64_t row) const;
  // The row's bytes as stored. Throws std::runtime_error, naming file, tensor and row.
  void read(int64_t row, void* dst) const;

  ops::DType dtype() const { return dtype_; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t row_bytes() const { return cols_ * (dtype_ == ops::DType::kF32 ? 4 : 2); }

 private:
  std::string path_, tensor_;
  int64_t offset_;
  ops::DType dtype_;
  int64_t rows_, cols_;
  int fd_;
};

class Executor;
class Node;
struct NodeSpec;

// The `embed` node of a specification that has a table. Throws std::invalid_argument if it does not fit the
// program.
std::unique_ptr<Node> make_embed_file(const NodeSpec& spec, Executor& executor);

}  // namespace ktc::graph
