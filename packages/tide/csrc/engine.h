// The device itself: streams, clocks, what is in flight, and the one lock around them.
//
// [Note: streams, threads and locks]
//
// Four kinds of threads meet here: the user's threads, autograd's device thread, the workers
// of asynchronous mode, and gloo's. Three rules keep them apart.
//
// 1. One lock. `Engine::mutex` guards all bookkeeping: clocks, vector clocks, the allocator,
//    the race detector, copies in flight. It is held for bookkeeping only: never while a kernel
//    runs, never while waiting for a worker (its jobs may need the lock), never while taking
//    the GIL (its holder may be waiting for the lock). Python stacks and the out-of-memory
//    callback are therefore taken with no lock held.
//
// 2. Issue order is execution order. In virtual mode a kernel runs on the calling thread, and
//    two threads may issue to one stream: `Turn` owns the stream from issue to completion. It
//    is let go before outputs are allocated, because allocation may call back into Python, and
//    that code may use the stream. In asynchronous mode the queue is the order, and a kernel
//    whose result the host needs is queued too: the caller waits for it.
//
// 3. Jobs hold raw addresses. A queued job that held a storage would keep it alive and hide
//    exactly the lifetime mistakes this device exists to show.
//
// Time is computed when work is issued, in both modes: clocks never depend on how fast this
// computer is. Order is tracked by vector clocks with one entry for the host and one for each
// stream; issuing is an action of the host that the stream sees, so whatever the host has waited
// for is over for the kernels it launches next. There is one host, not one for each thread:
// autograd's hand-over to its device thread is invisible here, and treating the threads of a
// process as unordered would report every backward as a race.
//
// Copies between pinned and device memory read early and land late. In virtual mode the
// source is read at issue and the destination written only when somebody is entitled to see it:
// the stream itself, when it next touches those bytes, or whoever has waited for the copy.
// A program that forgets the wait finds old bytes there, on every run. A copy whose source
// raced (it was not yet written, or was freed and reused meanwhile) delivers poison.
#pragma once

#include "faults.h"
#include "machine.h"
#include "race.h"
#include "timeline.h"
#include "vector_clock.h"
#include "worker.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace tide {

using Lock = std::unique_lock<std::mutex>;

constexpr int kMaxDevices = 8;
constexpr int kPoison = 0xff; // NaN in every floating type, -1 in every integer type

struct StreamState {
  int agent = 0;
  c10::StreamId id = 0;
  c10::DeviceIndex device = 0;
  int priority = 0;
  Nanoseconds idle_at = 0; // when everything issued so far is done
  VectorClock seen;
  std::mutex running; // see rule 2
  Worker worker;
};

// A point in a stream's order: what an event records, and what a freed block waits for.
struct Moment {
  StreamState* stream = nullptr;
  Nanoseconds time = 0;
  VectorClock seen;
  uint64_t job = 0;
};

struct Options {
  bool asynchronous = false;
  bool races = true;
  bool poison = true;
  uint64_t efficiency_seed = 0;
  int64_t capacity = 80LL << 30;
  int64_t pinned_capacity = 64LL << 30;
};

// A copy that has been issued and read, and has not landed.
struct Flight {
  StreamState* stream = nullptr;
  uint64_t tick = 0;
  uintptr_t destination = 0;
  std::vector<char> bytes;
  OriginPtr origin;
};

// What `begin` hands to the rest of an operator's issue.
struct Issue {
  StreamState* stream = nullptr;
  uint64_t tick = 0;
  OriginPtr origin;
  bool read_raced = false;
};

class Engine {
 public:
  static Engine& get();

  std::mutex mutex;
  Machine machine;
  Options options;
  Faults faults;
  Timeline timeline;
  RaceDetector races;

  // Streams. Stream 0 of a device is its default stream.
  StreamState& stream(c10::DeviceIndex device, c10::StreamId id);
  StreamState& current_stream(c10::DeviceIndex device);
  StreamState& new_stream(c10::DeviceIndex device, int priority);
  std::vector<StreamState*> streams(c10::DeviceIndex device); // -1: of all devices

  // The functions below want the lock held.
  Nanoseconds now() const {
    return host_time_;
  }
  void advance_host(Nanoseconds by) {
    host_time_ += by;
  }
  Moment mark(StreamState&);
  void wait(StreamState&, const Moment&);
  bool passed(const Moment&) const;
  void host_sees(const Moment&); // the host has waited for it
  void host_sees_all(c10::DeviceIndex device);
  Issue begin(StreamState&, const std::vector<Access>&, OriginPtr);
  void touch(const Issue&, const Access&);
  // An access by the host itself (pinned memory).
  void host_touch(const Access&, const OriginPtr&);
  void finish_kernel(const Issue&, const std::string& name, const Work&, bool host_waits);
  void finish_copy(const Issue&, Link, int64_t bytes, bool host_waits, Nanoseconds extra);
  void fly(const Issue&, uintptr_t destination, std::vector<char> bytes);
  void land_all();
  void land_covered(const VectorClock& seen); // what is over by then has arrived

  // The functions below take the lock themselves and may block.
  void wait_host(const Moment&);
  void synchronize(c10::DeviceIndex device);
  // Runs a kernel at its place in the stream: queued in asynchronous mode, at once otherwise.
  void submit(StreamState&, std::function<void()> job);
  // The same, and returns only when it has run; its exceptions are the caller's.
  void run(StreamState&, const std::function<void()>& job);
  // Raises what a queued job threw.
  void raise_errors(StreamState&);
  void reset();

  bool asynchronous() const {
    return options.asynchronous;
  }
  // How often the clocks went back to zero: times from before mean nothing.
  uint64_t resets() const {
    return resets_;
  }

 private:
  Engine();
  void land_touched(StreamState&, const std::vector<Access>&);
  void land(Flight&);
  bool check(const Access&, int agent, uint64_t tick, const VectorClock&, const OriginPtr&);

  Nanoseconds host_time_ = 0;
  uint64_t resets_ = 0;
  VectorClock host_seen_;
  Nanoseconds link_free_[kMaxDevices][2] = {};
  std::deque<std::unique_ptr<StreamState>> streams_; // by agent - 1
  std::mutex streams_mutex_;
  std::deque<Flight> flights_;
};

// Owns a stream for a kernel on the calling thread; does nothing in asynchronous mode.
class Turn {
 public:
  explicit Turn(StreamState& stream);
  void release() {
    if (lock_.owns_lock()) {
      lock_.unlock();
    }
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

// The origin of an action if races are detected, nothing otherwise. No lock held, please.
OriginPtr origin_of(const char* what, const StreamState*);

int device_count();
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex);
c10::StreamId exchange_current_stream(c10::DeviceIndex, c10::StreamId);

// Raises in a forked child: its copy of the device has no threads and somebody's locks.
void check_fork();
bool in_forked_child();

} // namespace tide
