#include "engine.h"

#include <c10/util/Exception.h>

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace tide {
namespace {

std::atomic<bool> forked{false};

thread_local c10::DeviceIndex tls_device = 0;
thread_local c10::StreamId tls_streams[kMaxDevices] = {};

bool overlaps(const Flight& flight, const Access& access) {
  return flight.destination < access.end &&
      access.begin < flight.destination + flight.bytes.size();
}

} // namespace

int device_count() {
  // Fixed at import: autograd counts devices once, when it starts its threads.
  static const int count = [] {
    const char* text = std::getenv("TIDE_DEVICES");
    const int wanted = text ? std::atoi(text) : 1;
    return std::clamp(wanted, 1, kMaxDevices);
  }();
  return count;
}

c10::DeviceIndex current_device() {
  return tls_device;
}

void set_current_device(c10::DeviceIndex device) {
  TORCH_CHECK(
      device >= 0 && device < device_count(),
      "tide: there is no device ", static_cast<int>(device), "; there are ", device_count(),
      " (set TIDE_DEVICES before importing tide to have more)");
  tls_device = device;
}

c10::StreamId exchange_current_stream(c10::DeviceIndex device, c10::StreamId id) {
  return std::exchange(tls_streams[device], id);
}

bool in_forked_child() {
  return forked.load(std::memory_order_relaxed);
}

void check_fork() {
  TORCH_CHECK(
      !in_forked_child(),
      "Cannot re-initialize tide in forked subprocess. To use tide with multiprocessing, you "
      "must use the 'spawn' start method");
}

Engine& Engine::get() {
  static Engine* engine = new Engine(); // leaked: tensors may outlive static destructors
  return *engine;
}

Engine::Engine() {
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
  for (int device = 0; device < device_count(); ++device) {
    new_stream(static_cast<c10::DeviceIndex>(device), 0).id = 0;
  }
}

StreamState& Engine::new_stream(c10::DeviceIndex device, int priority) {
  std::lock_guard<std::mutex> lock(streams_mutex_);
  auto state = std::make_unique<StreamState>();
  state->agent = static_cast<int>(streams_.size()) + 1;
  state->id = state->agent;
  state->device = device;
  state->priority = priority;
  streams_.push_back(std::move(state));
  return *streams_.back();
}

StreamState& Engine::stream(c10::DeviceIndex device, c10::StreamId id) {
  std::lock_guard<std::mutex> lock(streams_mutex_);
  const size_t index = id == 0 ? device : id - 1;
  TORCH_CHECK(
      index < streams_.size() && streams_[index]->device == device,
      "tide: no stream ", id, " on device ", static_cast<int>(device));
  return *streams_[index];
}

StreamState& Engine::current_stream(c10::DeviceIndex device) {
  return stream(device, tls_streams[device]);
}

std::vector<StreamState*> Engine::streams(c10::DeviceIndex device) {
  std::lock_guard<std::mutex> lock(streams_mutex_);
  std::vector<StreamState*> found;
  for (const auto& stream : streams_) {
    if (device < 0 || stream->device == device) {
      found.push_back(stream.get());
    }
  }
  return found;
}

Moment Engine::mark(StreamState& stream) {
  stream.seen.join(host_seen_);
  Moment moment;
  moment.stream = &stream;
  moment.time = std::max(stream.idle_at, host_time_);
  moment.seen = stream.seen;
  moment.job = stream.worker.last();
  return moment;
}

void Engine::wait(StreamState& stream, const Moment& moment) {
  stream.seen.join(host_seen_);
  stream.seen.join(moment.seen);
  stream.idle_at = std::max(stream.idle_at, moment.time);
  land_covered(stream.seen);
  if (asynchronous() && moment.stream != &stream) {
    Worker* other = &moment.stream->worker;
    const uint64_t job = moment.job;
    stream.worker.submit([other, job] { other->wait(job); });
  }
}

bool Engine::passed(const Moment& moment) const {
  return asynchronous() ? moment.stream->worker.done(moment.job) : moment.time <= host_time_;
}

void Engine::host_sees(const Moment& moment) {
  host_seen_.join(moment.seen);
  host_time_ = std::max(host_time_, moment.time);
  land_covered(host_seen_);
}

void Engine::host_sees_all(c10::DeviceIndex device) {
  for (StreamState* stream : streams(device)) {
    host_seen_.join(stream->seen);
    host_time_ = std::max(host_time_, stream->idle_at);
  }
  land_covered(host_seen_);
}

Issue Engine::begin(StreamState& stream, const std::vector<Access>& accesses, OriginPtr origin) {
  stream.seen.join(host_seen_);
  host_seen_.advance(kHost);
  Issue issue;
  issue.stream = &stream;
  issue.tick = stream.seen.advance(stream.agent);
  issue.origin = std::move(origin);
  land_touched(stream, accesses);
  for (const Access& access : accesses) {
    const bool raced = check(access, stream.agent, issue.tick, stream.seen, issue.origin);
    issue.read_raced |= raced && !access.write;
  }
  return issue;
}

void Engine::touch(const Issue& issue, const Access& access) {
  check(access, issue.stream->agent, issue.tick, issue.stream->seen, issue.origin);
}

void Engine::host_touch(const Access& access, const OriginPtr& origin) {
  const uint64_t tick = host_seen_.advance(kHost);
  check(access, kHost, tick, host_seen_, origin);
}

bool Engine::check(
    const Access& access, int agent, uint64_t tick, const VectorClock& seen, const OriginPtr& origin) {
  if (!origin) {
    return false; // races are not being detected
  }
  const auto raced = races.access(access, agent, tick, seen, origin);
  if (access.write) {
    for (const OriginPtr& earlier : raced) {
      for (Flight& flight : flights_) {
        const bool is_its_source = flight.origin == earlier && !overlaps(flight, access);
        if (is_its_source) { // its source was overwritten under way
          std::fill(flight.bytes.begin(), flight.bytes.end(), static_cast<char>(kPoison));
        }
      }
    }
  }
  return !raced.empty();
}

void Engine::finish_kernel(
    const Issue& issue, const std::string& name, const Work& work, bool host_waits) {
  StreamState& stream = *issue.stream;
  host_time_ += machine.launch;
  const Nanoseconds duration = kernel_duration(machine, name, work, options.efficiency_seed);
  const Nanoseconds start = std::max(stream.idle_at, host_time_);
  stream.idle_at = start + duration;
  if (timeline.recording) {
    timeline.spans.push_back(
        {name, "stream " + std::to_string(stream.id), stream.device, start, duration, work.bytes,
         work.flops});
  }
  if (host_waits) {
    host_sees(mark(stream));
  }
}

void Engine::finish_copy(
    const Issue& issue, Link link, int64_t bytes, bool host_waits, Nanoseconds extra) {
  StreamState& stream = *issue.stream;
  host_time_ += machine.launch;
  Nanoseconds& link_free = link_free_[stream.device][static_cast<int>(link)];
  const Nanoseconds duration =
      copy_duration(machine, link, bytes, options.efficiency_seed) + extra;
  const Nanoseconds start = std::max({stream.idle_at, host_time_, link_free});
  stream.idle_at = start + duration;
  link_free = stream.idle_at;
  if (timeline.recording) {
    const bool in = link == Link::HostToDevice;
    timeline.spans.push_back(
        {in ? "copy host to device" : "copy device to host", in ? "link in" : "link out",
         stream.device, start, duration, bytes, 0});
  }
  if (host_waits) {
    host_sees(mark(stream));
  }
}

void Engine::fly(const Issue& issue, uintptr_t destination, std::vector<char> bytes) {
  if (issue.read_raced) {
    std::fill(bytes.begin(), bytes.end(), static_cast<char>(kPoison));
  }
  flights_.push_back({issue.stream, issue.tick, destination, std::move(bytes), issue.origin});
}

void Engine::land(Flight& flight) {
  std::memcpy(reinterpret_cast<void*>(flight.destination), flight.bytes.data(), flight.bytes.size());
}

void Engine::land_covered(const VectorClock& seen) {
  for (auto it = flights_.begin(); it != flights_.end();) {
    if (seen.covers(it->stream->agent, it->tick)) {
      land(*it);
      it = flights_.erase(it);
    } else {
      ++it;
    }
  }
}

void Engine::land_touched(StreamState& stream, const std::vector<Access>& accesses) {
  uint64_t last = 0; // copies of one stream land in order
  for (const Flight& flight : flights_) {
    if (flight.stream != &stream) {
      continue;
    }
    for (const Access& access : accesses) {
      if (overlaps(flight, access)) {
        last = flight.tick;
      }
    }
  }
  for (auto it = flights_.begin(); it != flights_.end();) {
    if (it->stream == &stream && it->tick <= last) {
      land(*it);
      it = flights_.erase(it);
    } else {
      ++it;
    }
  }
}

void Engine::land_all() {
  for (Flight& flight : flights_) {
    land(flight);
  }
  flights_.clear();
}

void Engine::wait_host(const Moment& moment) {
  if (asynchronous()) {
    moment.stream->worker.wait(moment.job);
    raise_errors(*moment.stream);
  }
  Lock lock(mutex);
  host_sees(moment);
}

void Engine::synchronize(c10::DeviceIndex device) {
  check_fork();
  const auto all = streams(device);
  if (asynchronous()) {
    for (StreamState* stream : all) {
      stream->worker.wait(stream->worker.last());
    }
    for (StreamState* stream : all) {
      raise_errors(*stream);
    }
  }
  Lock lock(mutex);
  host_sees_all(device);
}

void Engine::submit(StreamState& stream, std::function<void()> job) {
  if (asynchronous()) {
    stream.worker.submit(std::move(job));
  } else {
    job();
  }
}

void Engine::run(StreamState& stream, const std::function<void()>& job) {
  if (!asynchronous()) {
    job();
    return;
  }
  std::exception_ptr error;
  const uint64_t number = stream.worker.submit([&] {
    try {
      job();
    } catch (...) {
      error = std::current_exception();
    }
  });
  stream.worker.wait(number);
  if (error) {
    std::rethrow_exception(error);
  }
}

void Engine::raise_errors(StreamState& stream) {
  if (const auto error = stream.worker.take_error()) {
    std::rethrow_exception(error);
  }
}

void Engine::reset() {
  for (StreamState* stream : streams(-1)) {
    stream->worker.wait(stream->worker.last());
    stream->worker.take_error();
  }
  Lock lock(mutex);
  land_all();
  host_time_ = 0;
  ++resets_;
  // Vector clocks only ever grow: an event recorded before the reset may still be waited for,
  // and must not seem to cover what happens after it.
  for (StreamState* stream : streams(-1)) {
    stream->idle_at = 0;
  }
  std::fill(&link_free_[0][0], &link_free_[0][0] + kMaxDevices * 2, 0);
  races.clear();
  timeline = Timeline();
  faults = Faults();
}

Turn::Turn(StreamState& stream) {
  if (!Engine::get().asynchronous()) {
    lock_ = std::unique_lock<std::mutex>(stream.running);
  }
}

OriginPtr origin_of(const char* what, const StreamState* stream) {
  if (!Engine::get().options.races) {
    return nullptr;
  }
  return capture_origin(what, stream ? stream->agent : kHost);
}

} // namespace tide
