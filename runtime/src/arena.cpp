#include "arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <new>
#include <utility>

namespace ktc {

Mapping::Mapping(int64_t nbytes) {
  if (nbytes <= 0) return;
  const bool huge = nbytes >= kHugePage;
  const int64_t unit = huge ? kHugePage : 4096;
  size_ = (nbytes + unit - 1) / unit * unit;
  mapped_ = huge ? size_ + kHugePage : size_;
  base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base_ == MAP_FAILED) {
    base_ = nullptr;
    throw std::bad_alloc();
  }
  const uintptr_t address = reinterpret_cast<uintptr_t>(base_);
  data_ = reinterpret_cast<uint8_t*>(huge ? (address + kHugePage - 1) / kHugePage * kHugePage : address);
  if (huge) madvise(data_, size_, MADV_HUGEPAGE);  // only advice: 4 KB pages work too
}

Mapping::~Mapping() {
  if (base_ != nullptr) munmap(base_, mapped_);
}

void Mapping::swap(Mapping& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_, other.size_);
  std::swap(base_, other.base_);
  std::swap(mapped_, other.mapped_);
}

void Arena::reserve(int64_t nbytes) {
  used_ = 0;
  if (nbytes <= mapping_.size()) return;
  const int64_t grown = std::max(nbytes, mapping_.size() + mapping_.size() / 2);
  mapping_ = Mapping();  // release first: the old contents are not needed
  mapping_ = Mapping(grown);
}

}  // namespace ktc
