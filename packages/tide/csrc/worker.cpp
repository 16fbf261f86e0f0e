#include "worker.h"

#include <ATen/Parallel.h>

namespace tide {

Worker::~Worker() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  work_.notify_all();
  if (thread_.joinable()) {
    thread_.join();
  }
}

uint64_t Worker::submit(std::function<void()> job) {
  uint64_t number = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!thread_.joinable()) {
      thread_ = std::thread([this] { loop(); });
    }
    jobs_.push_back(std::move(job));
    number = ++submitted_;
  }
  work_.notify_one();
  return number;
}

uint64_t Worker::last() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return submitted_;
}

bool Worker::done(uint64_t job) const {
  std::lock_guard<std::mutex> lock(mutex_);
  return completed_ >= job;
}

void Worker::wait(uint64_t job) {
  std::unique_lock<std::mutex> lock(mutex_);
  finished_.wait(lock, [&] { return completed_ >= job; });
}

std::exception_ptr Worker::take_error() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(error_, nullptr);
}

void Worker::loop() {
  // Kernels split their work by the number of threads, and sums depend on the split: without
  // this a worker could use another number than the thread that issues in virtual mode.
  at::init_num_threads();
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    work_.wait(lock, [&] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) {
      return; // stopping, and everything queued has run
    }
    auto job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    std::exception_ptr error;
    try {
      job();
    } catch (...) {
      error = std::current_exception();
    }
    job = nullptr; // what the job captured dies here, without the lock
    lock.lock();
    if (error && !error_) {
      error_ = error;
    }
    ++completed_;
    finished_.notify_all();
  }
}

} // namespace tide
