#include "copy.h"

#include "alias.h"
#include "below.h"
#include "engine.h"
#include "pinned.h"

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>

namespace tide {
namespace {

Access whole(const void* start, size_t bytes, bool write) {
  const auto begin = reinterpret_cast<uintptr_t>(start);
  return {begin, begin + bytes, write};
}

// Counts a copy and says what an armed fault wants from it.
Nanoseconds copy_fault(Lock& lock, Link link, int64_t bytes) {
  Engine& engine = Engine::get();
  Faults& faults = engine.faults;
  ++faults.copies_seen;
  Nanoseconds extra = 0;
  if (faults.copies_seen == faults.delay_copy) {
    extra += faults.delay;
  }
  if (faults.copies_seen == faults.reorder_copy) {
    // Overtaken by a copy of its own size.
    extra += copy_duration(engine.machine, link, bytes, engine.options.efficiency_seed);
  }
  if (faults.copies_seen == faults.fail_copy) {
    const auto number = faults.copies_seen;
    lock.unlock();
    TORCH_CHECK(false, "tide: copy ", number, " failed (a fault armed by the test)");
  }
  return extra;
}

// One side is host memory, the other device memory; both contiguous, same dtype.
void copy_over_link(const at::Tensor& destination, const at::Tensor& source, bool non_blocking) {
  const bool in = is_tide(destination);
  const at::Tensor& device_side = in ? destination : source;
  const at::Tensor& host_side = in ? source : destination;
  const size_t bytes = destination.nbytes();
  if (bytes == 0) {
    return;
  }
  const c10::OptionalDeviceGuard guard(device_side.device());
  Engine& engine = Engine::get();
  check_fork();
  StreamState& stream = engine.current_stream(device_side.device().index());
  const bool pinned = is_pinned(host_side.const_data_ptr());
  const bool asynchronous = pinned && non_blocking;
  const Link link = in ? Link::HostToDevice : Link::DeviceToHost;
  const void* from = source.const_data_ptr();
  void* to = destination.mutable_data_ptr();

  std::vector<Access> accesses;
  if (pinned || !in) {
    accesses.push_back(whole(from, bytes, false));
  }
  if (pinned || in) {
    accesses.push_back(whole(to, bytes, true));
  }
  const auto origin = origin_of(in ? "copy host to device" : "copy device to host", &stream);

  Turn turn(stream);
  Nanoseconds extra = 0;
  bool read_raced = false;
  {
    Lock lock(engine.mutex);
    extra = copy_fault(lock, link, static_cast<int64_t>(bytes));
    const Issue issue = engine.begin(stream, accesses, origin);
    read_raced = issue.read_raced;
    engine.finish_copy(issue, link, static_cast<int64_t>(bytes), false, extra);
    if (pinned) {
      record_pinned_use(in ? from : to, stream);
    }
    if (!engine.asynchronous() && asynchronous) {
      const auto* begin = static_cast<const char*>(from);
      engine.fly(issue, reinterpret_cast<uintptr_t>(to), std::vector<char>(begin, begin + bytes));
    }
  }
  if (!engine.asynchronous() && asynchronous) {
    return;
  }
  const auto job = [from, to, bytes, extra] {
    if (extra > 0 && Engine::get().asynchronous()) {
      // A delayed copy must really be late here, or nobody would notice a missing wait.
      std::this_thread::sleep_for(
          std::min(std::chrono::nanoseconds(extra * 100), std::chrono::nanoseconds(20'000'000)));
    }
    std::memcpy(to, from, bytes);
  };
  if (asynchronous) {
    engine.submit(stream, job);
    return;
  }
  engine.run(stream, job);
  if (read_raced && !engine.asynchronous()) {
    std::memset(to, kPoison, bytes);
  }
  Lock lock(engine.mutex);
  engine.host_sees(engine.mark(stream)); // the host has waited
}

// Both on one device: a kernel like any other, casting and gathering as it goes.
void copy_on_device(const at::Tensor& destination, const at::Tensor& source) {
  const c10::OptionalDeviceGuard guard(destination.device());
  Engine& engine = Engine::get();
  StreamState& stream = engine.current_stream(destination.device().index());
  std::vector<Access> accesses;
  add_accesses(source, false, accesses);
  add_accesses(destination, true, accesses);
  const auto origin = origin_of("aten::copy_", &stream);
  AliasSet aliases;
  auto to = aliases.of(destination);
  const auto from = aliases.of(source);
  Work work;
  work.bytes = bytes_of(source) + bytes_of(destination);
  work.dtype = destination.scalar_type();
  Turn turn(stream);
  {
    Lock lock(engine.mutex);
    const Issue issue = engine.begin(stream, accesses, origin);
    engine.finish_kernel(issue, "aten::copy_", work, false);
  }
  engine.submit(stream, [to, from]() mutable {
    const BelowEverything below;
    to.copy_(from);
  });
}

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return (a.is_contiguous() && b.is_contiguous()) ||
      (a.is_non_overlapping_and_dense() && a.strides() == b.strides());
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& destination, bool non_blocking) {
  if (destination.numel() == 0) {
    return destination;
  }
  const at::Tensor source = self.sizes() == destination.sizes() ? self : self.expand(destination.sizes());
  if (is_tide(source) && is_tide(destination)) {
    if (source.device() == destination.device()) {
      copy_on_device(destination, source);
    } else {
      // No peer link is modelled: over the host, as a machine without one would do it.
      destination.copy_(source.cpu());
    }
    return destination;
  }
  // As CUDA does: a copy over the link is a plain run of bytes. What differs in dtype or layout
  // is converted on the source's side first, and scattered on the destination's side last.
  if (source.scalar_type() == destination.scalar_type() && same_layout(source, destination) &&
      source.is_neg() == destination.is_neg() && source.is_conj() == destination.is_conj()) {
    copy_over_link(destination, source, non_blocking);
    return destination;
  }
  const at::Tensor plain =
      source.to(destination.scalar_type()).resolve_conj().resolve_neg().contiguous();
  if (destination.is_contiguous() && !destination.is_conj() && !destination.is_neg()) {
    copy_over_link(destination, plain, non_blocking);
    return destination;
  }
  const at::Tensor landing = at::empty(destination.sizes(), destination.options());
  copy_over_link(landing, plain, non_blocking);
  destination.copy_(landing, non_blocking);
  return destination;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& destination) {
  destination.resize_(self.sizes());
  return copy_from(self, destination, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  const at::Tensor host = at::empty({}, self.options().device(at::kCPU));
  copy_over_link(host, self.reshape({}), false);
  return host.item();
}

} // namespace

void copy_bytes_on_device(
    c10::DeviceIndex device, void* destination, const void* source, size_t bytes) {
  Engine& engine = Engine::get();
  StreamState& stream = engine.current_stream(device);
  const auto origin = origin_of("resize storage", &stream);
  Work work;
  work.bytes = 2 * static_cast<int64_t>(bytes);
  Turn turn(stream);
  {
    Lock lock(engine.mutex);
    const Issue issue = engine.begin(
        stream, {whole(source, bytes, false), whole(destination, bytes, true)}, origin);
    engine.finish_kernel(issue, "resize storage", work, false);
  }
  engine.submit(stream, [=] { std::memcpy(destination, source, bytes); });
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
}

// Copies understand lazy conjugation and negation themselves. Without this torch would resolve the
// argument first, by a copy, which would resolve its argument first, by a copy ...
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

} // namespace tide
