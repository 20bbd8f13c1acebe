// A device stream as tests have it: work that runs in order on a thread of its own.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

class ThreadStream {
 public:
  using Work = std::function<void()>;

  ThreadStream() : thread_([this] { run(); }) {}
  ~ThreadStream() {
    push([this] { stop_ = true; });
    thread_.join();
  }
  ThreadStream(const ThreadStream&) = delete;
  ThreadStream& operator=(const ThreadStream&) = delete;

  void push(Work work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(work));
    ++pending_;
    ready_.notify_one();
  }
  // Until all that was pushed has run.
  void synchronize() {
    std::unique_lock<std::mutex> lock(mutex_);
    idle_.wait(lock, [this] { return pending_ == 0; });
  }

 private:
  void run() {
    while (!stop_) {
      Work work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        ready_.wait(lock, [this] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      work();
      const std::lock_guard<std::mutex> lock(mutex_);
      if (--pending_ == 0) idle_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable ready_, idle_;
  std::deque<Work> queue_;
  int pending_ = 0;
  bool stop_ = false;
  std::thread thread_;  // last: it uses the rest from its first moment on
};
