// A stand-in for libcudart on machines without CUDA: streams are threads, device memory is host memory.
//
// It has the four functions that the lane looks up, with CUDA's ordering rules (work of a stream runs in
// order, later and on another thread), and a minimal graph: work enqueued while a stream captures is kept and
// replayed. It is how the callback protocol runs in tests here; it says nothing about CUDA itself.
#include <atomic>
#include <cstring>
#include <functional>
#include <memory>
#include <vector>

#include "../../runtime/tests/thread_stream.h"

namespace {

using Work = ThreadStream::Work;

class Stream : public ThreadStream {
 public:
  void enqueue(Work work) {
    if (recording) {
      recording->push_back(std::move(work));
    } else {
      push(std::move(work));
    }
  }
  std::vector<Work>* recording = nullptr;
};

Stream& stream_of(void* handle) {
  static Stream default_stream;
  return handle == nullptr ? default_stream : *static_cast<Stream*>(handle);
}

std::atomic<int> fail_next{0}, launches{0};

int taken_failure() { return fail_next.exchange(0); }

}  // namespace

extern "C" {

int cudaMemcpyAsync(void* dst, const void* src, size_t bytes, int kind, void* stream) {
  if (const int error = taken_failure()) return error;
  if (kind != 4) return 21;
  stream_of(stream).enqueue([=] { std::memcpy(dst, src, bytes); });
  return 0;
}

int cudaLaunchHostFunc(void* stream, void (*function)(void*), void* data) {
  if (const int error = taken_failure()) return error;
  stream_of(stream).enqueue([=] { function(data); });
  return 0;
}

int cudaStreamSynchronize(void* stream) {
  stream_of(stream).synchronize();
  return 0;
}

const char* cudaGetErrorString(int error) { return error == 700 ? "an illegal memory access" : "some error"; }

// ---- for tests -----------------------------------------------------------------------------------
void* fake_stream() { return new Stream(); }
void fake_stream_destroy(void* stream) { delete static_cast<Stream*>(stream); }
void fake_begin_capture(void* stream) { stream_of(stream).recording = new std::vector<Work>(); }
void* fake_end_capture(void* stream) {
  void* const graph = stream_of(stream).recording;
  stream_of(stream).recording = nullptr;
  return graph;
}
void fake_launch(void* graph, void* stream) {
  ++launches;
  for (const Work& work : *static_cast<std::vector<Work>*>(graph)) stream_of(stream).enqueue(work);
}
int fake_nodes(void* graph) { return static_cast<int>(static_cast<std::vector<Work>*>(graph)->size()); }
void fake_graph_destroy(void* graph) { delete static_cast<std::vector<Work>*>(graph); }
void fake_fail_next(int error) { fail_next = error; }
}
