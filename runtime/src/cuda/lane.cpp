#include "cuda/lane.h"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <stdexcept>

namespace ktc::cuda {
namespace {

// dl_iterate_phdr callback: the path of a loaded libcudart.
int find_loaded(dl_phdr_info* info, size_t, void* out) {
  if (info->dlpi_name == nullptr || std::strstr(info->dlpi_name, "libcudart.so") == nullptr) return 0;
  *static_cast<std::string*>(out) = info->dlpi_name;
  return 1;
}

template <typename Function>
void resolve(void* library, const std::string& path, const char* name, Function** out) {
  void* const symbol = dlsym(library, name);
  if (symbol == nullptr) throw std::runtime_error(path + " has no " + name);
  *out = reinterpret_cast<Function*>(symbol);
}

}  // namespace

Cudart Cudart::find(const std::string& path) {
  Cudart c;
  c.path = path;
  if (c.path.empty()) dl_iterate_phdr(&find_loaded, &c.path);
  void* library = nullptr;
  if (!c.path.empty()) {
    library = dlopen(c.path.c_str(), RTLD_NOW | RTLD_LOCAL);
  } else {
    for (const char* name : {"libcudart.so.13", "libcudart.so.12", "libcudart.so"}) {
      library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
      c.path = name;
      if (library != nullptr) break;
    }
  }
  if (library == nullptr) {
    const char* const why = dlerror();
    throw std::runtime_error("no CUDA runtime in this process" +
                             (why != nullptr ? std::string(": ") + why : ""));
  }
  resolve(library, c.path, "cudaMemcpyAsync", &c.memcpy_async);
  resolve(library, c.path, "cudaLaunchHostFunc", &c.launch_host_func);
  resolve(library, c.path, "cudaStreamSynchronize", &c.stream_synchronize);
  resolve(library, c.path, "cudaGetErrorString", &c.get_error_string);
  return c;
}

Lane::Lane(std::unique_ptr<Exchange> exchange, Cudart cudart)
    : cudart_(std::move(cudart)), exchange_(std::move(exchange)) {}

int64_t Lane::bind(int layer, int64_t rows, bool decode, void* host_send, float* host_receive, bool partial) {
  if (layer < 0 || layer >= exchange_->layers())
    throw std::invalid_argument("cuda lane: there is no MoE layer " + std::to_string(layer));
  if (rows < 1 || host_send == nullptr || host_receive == nullptr)
    throw std::invalid_argument("cuda lane: staging for at least one row is needed");
  if (partial && rows != 1)
    throw std::invalid_argument("cuda lane: experts on the device are for steps of one row");
  const SendLayout layout(exchange_->hidden(), exchange_->top_k(layer), rows);
  auto* const bytes = static_cast<char*>(host_send);
  auto visit = std::make_unique<Visit>();
  visit->call = Call{layer,
                     rows,
                     decode,
                     partial,
                     reinterpret_cast<const float*>(bytes),
                     reinterpret_cast<const float*>(bytes + layout.weights),
                     reinterpret_cast<const int64_t*>(bytes + layout.ids),
                     host_receive};
  visit->exchange = exchange_.get();
  visit->host_send = host_send;
  visit->send_bytes = layout.bytes;
  visits_.push_back(std::move(visit));
  return static_cast<int64_t>(visits_.size()) - 1;
}

void Lane::submit(void* stream, int64_t call, const void* device_send) {
  Visit& visit = at(call);
  copy(stream, const_cast<void*>(visit.host_send), device_send, visit.send_bytes);
  check(cudart_.launch_host_func(stream, &on_submit, &visit), "cudaLaunchHostFunc");
}

void Lane::collect(void* stream, int64_t call, void* device_out) {
  Visit& visit = at(call);
  check(cudart_.launch_host_func(stream, &on_collect, &visit), "cudaLaunchHostFunc");
  copy(stream, device_out, visit.call.out, visit.call.rows * exchange_->hidden() * 4);
}

void Lane::copy(void* stream, void* dst, const void* src, int64_t bytes) {
  check(cudart_.memcpy_async(dst, src, static_cast<size_t>(bytes), Cudart::kMemcpyDefault, stream),
        "cudaMemcpyAsync");
}

void Lane::synchronize(void* stream) { check(cudart_.stream_synchronize(stream), "cudaStreamSynchronize"); }

Lane::Visit& Lane::at(int64_t call) {
  if (call < 0 || call >= static_cast<int64_t>(visits_.size()))
    throw std::invalid_argument("cuda lane: no such call " + std::to_string(call));
  return *visits_[static_cast<size_t>(call)];
}

void Lane::check(int status, const char* what) const {
  if (status == Cudart::kSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudart_.get_error_string(status));
}

void Lane::on_submit(void* data) {
  const Visit& visit = *static_cast<const Visit*>(data);
  visit.exchange->submit(visit.call);
}

void Lane::on_collect(void* data) {
  const Visit& visit = *static_cast<const Visit*>(data);
  visit.exchange->collect(visit.call);
}

}  // namespace ktc::cuda
