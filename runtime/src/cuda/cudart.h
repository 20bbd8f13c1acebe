// The few functions of the CUDA runtime that the lane needs, looked up in the libcudart that torch has
// already loaded.
//
// This library links no CUDA, so one build serves machines with and without it, and any CUDA release.
#pragma once

#include <cstddef>
#include <string>

namespace ktc::cuda {

// The entry points; check_abi.cu holds them against NVIDIA's headers.
struct Cudart {
  using MemcpyAsync = int(void* dst, const void* src, size_t bytes, int kind, void* stream);
  using LaunchHostFunc = int(void* stream, void (*function)(void*), void* data);
  using StreamSynchronize = int(void* stream);
  using GetErrorString = const char*(int error);
  static constexpr int kSuccess = 0;
  static constexpr int kMemcpyDefault = 4;

  std::string path;
  MemcpyAsync* memcpy_async = nullptr;
  LaunchHostFunc* launch_host_func = nullptr;
  StreamSynchronize* stream_synchronize = nullptr;
  GetErrorString* get_error_string = nullptr;

  // "" = the libcudart already in this process, else one that the loader finds by its usual names.
  // Throws std::runtime_error if there is none, or it lacks a function.
  static Cudart find(const std::string& path);
};

}  // namespace ktc::cuda
