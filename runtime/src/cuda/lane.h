// A CUDA stream as a model's layers see it: async copies, and callbacks that enqueue or wait.
//
// Everything here may be captured into a CUDA graph: nothing allocates on the device and nothing
// synchronises.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/cudart.h"
#include "cuda/exchange.h"

namespace ktc::cuda {

class Lane {
 public:
  Lane(std::unique_ptr<Exchange> exchange, Cudart cudart);
  Lane(const Lane&) = delete;
  Lane& operator=(const Lane&) = delete;

  // Staging (pinned host memory, SendLayout and f32 [rows, hidden]) for visits of one layer with so many
  // rows. `partial`: see Call. Returns a handle for submit and collect; it stays valid as long as the lane.
  int64_t bind(int layer, int64_t rows, bool decode, void* host_send, float* host_receive,
               bool partial = false);

  // Enqueue on `stream`: device send buffer -> staging, then the callback that hands it over.
  void submit(void* stream, int64_t call, const void* device_send);
  // Enqueue on `stream`: the callback that waits, then staging -> f32 [rows, hidden] on the device.
  void collect(void* stream, int64_t call, void* device_out);
  void copy(void* stream, void* dst, const void* src, int64_t bytes);
  void synchronize(void* stream);

  Exchange& exchange() { return *exchange_; }
  const Cudart& cudart() const { return cudart_; }

 private:
  struct Visit {
    Call call;
    Exchange* exchange;
    const void* host_send;
    int64_t send_bytes;
  };

  Visit& at(int64_t call);
  void check(int status, const char* what) const;
  static void on_submit(void* visit);
  static void on_collect(void* visit);

  Cudart cudart_;
  std::vector<std::unique_ptr<Visit>> visits_;
  std::unique_ptr<Exchange> exchange_;
};

}  // namespace ktc::cuda
