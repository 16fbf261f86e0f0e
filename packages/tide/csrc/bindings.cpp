// What Python sees: plain functions over plain values. The friendly side is in tide/*.py.
#include "allocator.h"
#include "engine.h"
#include "generator.h"
#include "machine.h"
#include "observe.h"
#include "pinned.h"
#include "stack.h"
#include "work.h"

#include <torch/csrc/utils/pybind.h>

#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace tide {
namespace {

template <typename T>
void take(const py::dict& values, const char* name, T& into) {
  if (values.contains(name)) {
    into = values[name].cast<T>();
  }
}

void configure(const py::dict& values) {
  Engine& engine = Engine::get();
  {
    py::gil_scoped_release release;
    engine.synchronize(-1);
  }
  // Casts first (they may raise), then the lock, never the other way round.
  Machine machine = engine.machine;
  take(values, "name", machine.name);
  take(values, "flops_fp64", machine.flops_fp64);
  take(values, "flops_fp32", machine.flops_fp32);
  take(values, "flops_half", machine.flops_half);
  take(values, "flops_fp8", machine.flops_fp8);
  take(values, "memory_bandwidth", machine.memory_bandwidth);
  take(values, "host_to_device_bandwidth", machine.host_to_device_bandwidth);
  take(values, "device_to_host_bandwidth", machine.device_to_host_bandwidth);
  take(values, "fabric_bandwidth", machine.fabric_bandwidth);
  take(values, "network_bandwidth", machine.network_bandwidth);
  take(values, "devices_per_node", machine.devices_per_node);
  take(values, "launch", machine.launch);
  take(values, "kernel_latency", machine.kernel_latency);
  take(values, "copy_latency", machine.copy_latency);
  take(values, "fabric_latency", machine.fabric_latency);
  Options options = engine.options;
  take(values, "asynchronous", options.asynchronous);
  take(values, "races", options.races);
  take(values, "poison", options.poison);
  take(values, "efficiency_seed", options.efficiency_seed);
  take(values, "capacity", options.capacity);
  take(values, "pinned_capacity", options.pinned_capacity);
  observe_host(options.races);
  Lock lock(engine.mutex);
  engine.machine = machine;
  engine.options = options;
}

py::dict configuration() {
  Engine& engine = Engine::get();
  Machine machine;
  Options options;
  {
    Lock lock(engine.mutex);
    machine = engine.machine;
    options = engine.options;
  }
  py::dict values;
  values["name"] = machine.name;
  values["flops_fp64"] = machine.flops_fp64;
  values["flops_fp32"] = machine.flops_fp32;
  values["flops_half"] = machine.flops_half;
  values["flops_fp8"] = machine.flops_fp8;
  values["memory_bandwidth"] = machine.memory_bandwidth;
  values["host_to_device_bandwidth"] = machine.host_to_device_bandwidth;
  values["device_to_host_bandwidth"] = machine.device_to_host_bandwidth;
  values["fabric_bandwidth"] = machine.fabric_bandwidth;
  values["network_bandwidth"] = machine.network_bandwidth;
  values["devices_per_node"] = machine.devices_per_node;
  values["launch"] = machine.launch;
  values["kernel_latency"] = machine.kernel_latency;
  values["copy_latency"] = machine.copy_latency;
  values["fabric_latency"] = machine.fabric_latency;
  values["asynchronous"] = options.asynchronous;
  values["races"] = options.races;
  values["poison"] = options.poison;
  values["efficiency_seed"] = options.efficiency_seed;
  values["capacity"] = options.capacity;
  values["pinned_capacity"] = options.pinned_capacity;
  return values;
}

py::dict describe(const Origin& origin) {
  py::dict result;
  result["what"] = origin.what;
  result["node"] = origin.node;
  result["agent"] = origin.agent;
  py::list frames;
  for (const StackFrame& frame : frames_of(origin)) {
    frames.append(py::make_tuple(frame.file, frame.line, frame.function));
  }
  result["stack"] = frames;
  return result;
}

py::list races() {
  Engine& engine = Engine::get();
  std::vector<Report> reports;
  {
    Lock lock(engine.mutex);
    reports = engine.races.reports();
  }
  py::list result;
  for (const Report& report : reports) {
    py::dict entry;
    entry["kind"] = report.kind;
    entry["first"] = describe(*report.first);
    entry["second"] = describe(*report.second);
    entry["bytes"] = report.end - report.begin;
    result.append(entry);
  }
  return result;
}

py::dict timeline() {
  Engine& engine = Engine::get();
  Timeline copy;
  {
    Lock lock(engine.mutex);
    copy = engine.timeline;
  }
  py::list spans;
  for (const Span& span : copy.spans) {
    spans.append(py::make_tuple(
        span.name, span.lane, span.device, span.start, span.duration, span.bytes, span.flops));
  }
  py::list memory;
  for (const MemorySample& sample : copy.memory) {
    memory.append(py::make_tuple(sample.device, sample.time, sample.allocated, sample.reserved));
  }
  py::dict result;
  result["spans"] = spans;
  result["memory"] = memory;
  return result;
}

void arm(const py::dict& values) {
  Engine& engine = Engine::get();
  Faults wanted;
  take(values, "fail_allocation", wanted.fail_allocation);
  take(values, "shrink_allocation", wanted.shrink_allocation);
  take(values, "shrink_bytes", wanted.shrink_bytes);
  take(values, "fail_copy", wanted.fail_copy);
  take(values, "delay_copy", wanted.delay_copy);
  take(values, "delay", wanted.delay);
  take(values, "reorder_copy", wanted.reorder_copy);
  take(values, "pinned_exhausted", wanted.pinned_exhausted);
  Lock lock(engine.mutex);
  engine.faults = wanted;
}

void on_allocation_failure(const py::object& callback) {
  if (callback.is_none()) {
    set_failure_callback(nullptr);
    return;
  }
  // Whichever thread drops the last copy must hold the GIL for it.
  std::shared_ptr<py::object> kept(new py::object(callback), [](py::object* object) {
    py::gil_scoped_acquire gil;
    delete object;
  });
  set_failure_callback([kept](size_t bytes, c10::DeviceIndex device) {
    py::gil_scoped_acquire gil;
    return (*kept)(bytes, static_cast<int>(device)).cast<bool>();
  });
}

} // namespace

} // namespace tide

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace tide;
  observe_host(Engine::get().options.races);
  using release = py::call_guard<py::gil_scoped_release>;
  m.def("configure", &configure);
  m.def("configuration", &configuration);
  m.def("reset", [] { Engine::get().reset(); }, release());
  m.def("now", [] {
    Lock lock(Engine::get().mutex);
    return Engine::get().now();
  }, release());
  m.def("advance", [](Nanoseconds by) {
    Lock lock(Engine::get().mutex);
    Engine::get().advance_host(by);
  }, release());
  m.def("stream_idle_at", [](int device, int64_t id) {
    StreamState& stream = Engine::get().stream(static_cast<c10::DeviceIndex>(device), id);
    Lock lock(Engine::get().mutex);
    return stream.idle_at;
  }, release());
  m.def("races", &races);
  m.def("clear_races", [] {
    Lock lock(Engine::get().mutex);
    Engine::get().races.clear_reports();
  }, release());
  m.def("record_timeline", [](bool on) {
    Lock lock(Engine::get().mutex);
    Engine::get().timeline = Timeline();
    Engine::get().timeline.recording = on;
  }, release());
  m.def("timeline", &timeline);
  m.def("arm", &arm);
  m.def("faults_seen", [] {
    Lock lock(Engine::get().mutex);
    return std::make_pair(
        Engine::get().faults.allocations_seen, Engine::get().faults.copies_seen);
  }, release());
  m.def("on_allocation_failure", &on_allocation_failure);
  m.def("pinned_stats", [] {
    const PinnedStats stats = pinned_stats();
    return std::make_tuple(stats.allocated, stats.reserved, stats.peak, stats.allocations);
  }, release());
  m.def("reset_pinned_peak", &reset_pinned_peak, release());
  m.def("empty_pinned_cache", &empty_pinned_cache, release());
  m.def("in_forked_child", &in_forked_child);
  m.def("default_generator", [](int device) {
    return default_generator(static_cast<c10::DeviceIndex>(device));
  });
  m.def("device_count", &device_count);
  m.def("current_device", [] { return static_cast<int>(current_device()); });
  m.def("set_device", [](int device) { set_current_device(static_cast<c10::DeviceIndex>(device)); });
  // torch.distributed must have been imported: the base class is registered there.
  m.def("bind_backend", [m] {
    py::class_<TideBackend, c10d::Backend, c10::intrusive_ptr<TideBackend>>(m, "Backend")
        .def(py::init<
             c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<c10d::Backend>,
             std::vector<int64_t>>());
  });
  m.def("kernel_efficiency", &kernel_efficiency);
  m.def("link_efficiency", &link_efficiency);
}
