#include "cuda/mapped.h"

#include <cstddef>

namespace ktc::cuda {
namespace {

struct View {
  ManagedArray managed;
  std::vector<int64_t> shape, strides;
};

void release(ManagedArray* managed) { delete static_cast<View*>(managed->context); }

}  // namespace

ManagedArray* view_memory(void* data, const std::vector<int64_t>& shape, ExchangedType type,
                          ExchangedDevice device) {
  auto* const view = new View{{}, shape, std::vector<int64_t>(shape.size(), 1)};
  for (std::size_t i = shape.size(); i-- > 1;) view->strides[i - 1] = view->strides[i] * shape[i];
  view->managed = {
      {data, device, static_cast<int32_t>(shape.size()), type, view->shape.data(), view->strides.data(), 0},
      view,
      &release};
  return &view->managed;
}

}  // namespace ktc::cuda
