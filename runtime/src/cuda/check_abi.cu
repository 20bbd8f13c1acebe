// Holds the hand-written declarations of cudart.h against NVIDIA's headers. Compiled by tests only (nvcc),
// never linked.
//
// The runtime looks these functions up by name, so nothing else would notice a changed signature.
#include <cuda_runtime_api.h>

#include <type_traits>

#include "cuda/cudart.h"

namespace {

using ktc::cuda::Cudart;

// Enumerations and opaque pointers are passed as int and void*: the same registers, which the sizes confirm.
static_assert(sizeof(cudaError_t) == sizeof(int) && std::is_enum<cudaError_t>::value, "status");
static_assert(sizeof(cudaMemcpyKind) == sizeof(int) && std::is_enum<cudaMemcpyKind>::value, "kind");
static_assert(sizeof(cudaStream_t) == sizeof(void*) && std::is_pointer<cudaStream_t>::value, "stream");
static_assert(static_cast<int>(cudaSuccess) == Cudart::kSuccess, "cudaSuccess");
static_assert(static_cast<int>(cudaMemcpyDefault) == Cudart::kMemcpyDefault, "cudaMemcpyDefault");
static_assert(std::is_same<cudaHostFn_t, void(CUDART_CB*)(void*)>::value, "callback");

static_assert(std::is_same<decltype(&cudaMemcpyAsync),
                           cudaError_t (*)(void*, const void*, size_t, cudaMemcpyKind, cudaStream_t)>::value,
              "cudaMemcpyAsync");
static_assert(
    std::is_same<decltype(&cudaLaunchHostFunc), cudaError_t (*)(cudaStream_t, cudaHostFn_t, void*)>::value,
    "cudaLaunchHostFunc");
static_assert(std::is_same<decltype(&cudaStreamSynchronize), cudaError_t (*)(cudaStream_t)>::value,
              "cudaStreamSynchronize");
static_assert(std::is_same<decltype(&cudaGetErrorString), const char* (*)(cudaError_t)>::value,
              "cudaGetErrorString");

}  // namespace
