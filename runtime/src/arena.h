// Anonymous memory: `Mapping` owns one range of pages, `Arena` is scratch that grows and is reused.
#pragma once

#include <cstdint>

namespace ktc {

constexpr int64_t kHugePage = 2 << 20;

// Zeroed pages; ranges of at least 2 MB are aligned to 2 MB and advised MADV_HUGEPAGE before any touch.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(int64_t nbytes);  // std::bad_alloc
  ~Mapping();
  Mapping(Mapping&& other) noexcept { swap(other); }
  Mapping& operator=(Mapping&& other) noexcept {
    swap(other);
    return *this;
  }

  uint8_t* data() const { return data_; }
  int64_t size() const { return size_; }

 private:
  void swap(Mapping& other) noexcept;

  uint8_t* data_ = nullptr;
  int64_t size_ = 0;
  void* base_ = nullptr;  // what mmap gave; data_ is aligned within it
  int64_t mapped_ = 0;
};

// Scratch of one job. `reserve` invalidates everything handed out before; `take` never fails after it.
class Arena {
 public:
  // Grows geometrically; contents are undefined afterwards.
  void reserve(int64_t nbytes);
  // 64-byte aligned space for `count` objects of T (plain data), not initialised.
  template <typename T>
  T* take(int64_t count) {
    T* p = reinterpret_cast<T*>(mapping_.data() + used_);
    used_ += bytes_for<T>(count);
    return p;
  }
  template <typename T>
  static int64_t bytes_for(int64_t count) {
    return (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }
  int64_t capacity() const { return mapping_.size(); }
  // Space taken after `mark` may be taken again after `rewind`: for buffers of which a call uses one set.
  int64_t mark() const { return used_; }
  void rewind(int64_t mark) { used_ = mark; }

 private:
  Mapping mapping_;
  int64_t used_ = 0;
};

}  // namespace ktc
