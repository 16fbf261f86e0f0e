// The thread behind a stream in asynchronous mode: an in-order queue of jobs.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

namespace tide {

class Worker {
 public:
  Worker() = default;
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;

  // Queues a job and returns its number; the thread starts with the first job.
  uint64_t submit(std::function<void()> job);
  // The number of the last job queued so far.
  uint64_t last() const;
  bool done(uint64_t job) const;
  // Blocks until the job is done. Must not be called with the engine's lock held: the job may
  // need that lock. Rethrows nothing; see `take_error`.
  void wait(uint64_t job);
  // The first exception that a job threw since the last call, if any. Like a device's
  // asynchronous errors it belongs to nobody in particular and surfaces at a synchronisation.
  std::exception_ptr take_error();

 private:
  void loop();

  mutable std::mutex mutex_;
  std::condition_variable work_;
  std::condition_variable finished_;
  std::deque<std::function<void()>> jobs_;
  uint64_t submitted_ = 0;
  uint64_t completed_ = 0;
  bool stopping_ = false;
  std::exception_ptr error_;
  std::thread thread_;
};

} // namespace tide
