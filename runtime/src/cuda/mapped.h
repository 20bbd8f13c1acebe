// Memory as a tensor of another device, in the exchange format of array libraries (DLPack).
//
// Pinned host memory has the same address on the host and on every CUDA device (unified addressing), so a
// device's kernels may read and write it through PCIe. torch has no public call for such a tensor, but takes
// any address with a device in this format. Here are the format's structures, and nothing that calls CUDA.
#pragma once

#include <cstdint>
#include <vector>

namespace ktc::cuda {

// The layout is the format's: unversioned DLManagedTensor.
struct ExchangedDevice {
  int32_t type;  // kCpu or kCuda
  int32_t index;
};
struct ExchangedType {
  uint8_t code;  // kFloat or kBfloat
  uint8_t bits;
  uint16_t lanes;
};
struct ExchangedArray {
  void* data;
  ExchangedDevice device;
  int32_t dimensions;
  ExchangedType type;
  int64_t* shape;
  int64_t* strides;
  uint64_t byte_offset;
};
struct ManagedArray {
  ExchangedArray array;
  void* context;
  void (*deleter)(ManagedArray*);
};
static_assert(sizeof(ExchangedArray) == 48 && sizeof(ManagedArray) == 64, "the format's layout");

inline constexpr int32_t kExchangeCpu = 1, kExchangeCuda = 2;
inline constexpr uint8_t kExchangeFloat = 2, kExchangeBfloat = 4;
inline constexpr const char* kUnusedCapsule = "dltensor";  // renamed by whoever takes it over

// A contiguous view of memory that its owner keeps alive; whoever takes it calls `deleter` once.
ManagedArray* view_memory(void* data, const std::vector<int64_t>& shape, ExchangedType type,
                          ExchangedDevice device);

}  // namespace ktc::cuda
