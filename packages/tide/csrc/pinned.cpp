#include "pinned.h"

#include "arena.h"
#include "engine.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <cstring>
#include <list>
#include <map>
#include <set>

namespace tide {
namespace {

struct PinnedBlock {
  uintptr_t start = 0;
  size_t size = 0;
  std::set<StreamState*> uses;
  std::vector<Moment> waits;
};

// Guarded by the engine's lock.
struct PinnedMemory {
  Arena arena{size_t{256} << 30};
  std::map<uintptr_t, PinnedBlock> allocated;
  std::list<PinnedBlock> pending;
  std::set<std::pair<size_t, uintptr_t>> free;
  PinnedStats stats;
};

PinnedMemory& memory() {
  static auto* pinned = new PinnedMemory();
  return *pinned;
}

constexpr size_t kPage = 4096;

size_t rounded(size_t bytes) {
  size_t size = kPage;
  while (size < bytes) {
    size *= 2;
  }
  return size;
}

void recycle(const PinnedBlock& block) {
  if (Engine::get().options.poison) {
    std::memset(reinterpret_cast<void*>(block.start), kPoison, block.size);
  }
  memory().free.emplace(block.size, block.start);
}

void reclaim_finished() {
  Engine& engine = Engine::get();
  auto& pending = memory().pending;
  for (auto it = pending.begin(); it != pending.end();) {
    bool over = true;
    for (const Moment& moment : it->waits) {
      over = over && engine.passed(moment);
    }
    if (!over) {
      ++it;
      continue;
    }
    for (const Moment& moment : it->waits) {
      engine.land_covered(moment.seen);
      engine.races.settle(it->start, it->start + it->size, moment.seen);
    }
    recycle(*it);
    it = pending.erase(it);
  }
}

void wait_for_uses(Lock& lock) {
  Engine& engine = Engine::get();
  std::vector<Moment> moments;
  for (const PinnedBlock& block : memory().pending) {
    moments.insert(moments.end(), block.waits.begin(), block.waits.end());
  }
  if (engine.asynchronous()) {
    lock.unlock();
    for (const Moment& moment : moments) {
      moment.stream->worker.wait(moment.job);
    }
    lock.lock();
  }
  for (const Moment& moment : moments) {
    engine.host_sees(moment);
  }
  reclaim_finished();
}

void release_cache() {
  PinnedMemory& pinned = memory();
  for (const auto& [size, start] : pinned.free) {
    Engine::get().races.forget(start, start + size);
    pinned.arena.give(reinterpret_cast<void*>(start), size);
    pinned.stats.reserved -= static_cast<int64_t>(size);
  }
  pinned.free.clear();
}

void delete_pinned(void* pointer) {
  if (!pointer || in_forked_child()) {
    return;
  }
  Engine& engine = Engine::get();
  Lock lock(engine.mutex);
  PinnedMemory& pinned = memory();
  const auto it = pinned.allocated.find(reinterpret_cast<uintptr_t>(pointer));
  if (it == pinned.allocated.end()) {
    return;
  }
  PinnedBlock block = std::move(it->second);
  pinned.allocated.erase(it);
  pinned.stats.allocated -= static_cast<int64_t>(block.size);
  for (StreamState* stream : block.uses) {
    block.waits.push_back(engine.mark(*stream));
  }
  block.uses.clear();
  if (block.waits.empty()) {
    recycle(block);
  } else {
    pinned.pending.push_back(std::move(block));
  }
}

struct TidePinnedAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    check_fork();
    if (bytes == 0) {
      return {nullptr, nullptr, &delete_pinned, c10::Device(c10::DeviceType::CPU)};
    }
    Engine& engine = Engine::get();
    const OriginPtr origin = origin_of("allocate pinned", nullptr);
    const size_t size = rounded(bytes);
    Lock lock(engine.mutex);
    PinnedMemory& pinned = memory();
    reclaim_finished();
    const auto fits = [&] {
      return !engine.faults.pinned_exhausted &&
          pinned.stats.reserved + static_cast<int64_t>(size) <= engine.options.pinned_capacity;
    };
    auto it = pinned.free.lower_bound({size, 0});
    const auto found = [&] { return it != pinned.free.end() && it->first == size; };
    if (!found() && !fits()) {
      wait_for_uses(lock);
      it = pinned.free.lower_bound({size, 0});
      if (!found()) {
        release_cache();
        it = pinned.free.end();
      }
    }
    uintptr_t start = 0;
    if (found() && !engine.faults.pinned_exhausted) {
      start = it->second;
      pinned.free.erase(it);
    } else {
      // A real driver reports this as a plain device error, on a card that may well be empty.
      if (!fits()) {
        const auto message = c10::str(
            "tide error: out of memory: could not pin ", size, " bytes of host memory; ",
            pinned.stats.reserved, " of ", engine.options.pinned_capacity, " are pinned");
        lock.unlock();
        throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, 2, message);
      }
      start = reinterpret_cast<uintptr_t>(pinned.arena.take(size));
      pinned.stats.reserved += static_cast<int64_t>(size);
    }
    PinnedBlock block;
    block.start = start;
    block.size = size;
    pinned.allocated.emplace(start, std::move(block));
    ++pinned.stats.allocations;
    pinned.stats.allocated += static_cast<int64_t>(size);
    pinned.stats.peak = std::max(pinned.stats.peak, pinned.stats.allocated);
    engine.host_touch({start, start + size, true}, origin);
    void* pointer = reinterpret_cast<void*>(start);
    return {pointer, pointer, &delete_pinned, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &delete_pinned;
  }

  void copy_data(void* destination, const void* source, size_t count) const override {
    default_copy_data(destination, source, count);
  }

  bool record_event(void* pointer, void*, c10::Stream stream) override {
    Engine& engine = Engine::get();
    StreamState& state = engine.stream(stream.device_index(), stream.id());
    Lock lock(engine.mutex);
    record_pinned_use(pointer, state);
    return true;
  }

  void empty_cache() override {
    Lock lock(Engine::get().mutex);
    wait_for_uses(lock);
    release_cache();
  }

  at::HostStats get_stats() override {
    const PinnedStats now = pinned_stats();
    at::HostStats stats;
    stats.active_bytes.current = now.allocated;
    stats.active_bytes.peak = now.peak;
    stats.allocated_bytes.current = now.reserved;
    stats.active_requests.allocated = now.allocations;
    return stats;
  }
  void reset_accumulated_stats() override {
    Lock lock(Engine::get().mutex);
    memory().stats.allocations = 0;
  }
  void reset_peak_stats() override {
    reset_pinned_peak();
  }
};

} // namespace

at::HostAllocator* pinned_allocator() {
  static auto* allocator = new TidePinnedAllocator();
  return allocator;
}

bool is_pinned(const void* pointer) {
  return memory().arena.contains(pointer);
}

void record_pinned_use(const void* pointer, StreamState& stream) {
  auto& allocated = memory().allocated;
  auto it = allocated.upper_bound(reinterpret_cast<uintptr_t>(pointer));
  if (it != allocated.begin()) {
    --it;
    if (reinterpret_cast<uintptr_t>(pointer) < it->second.start + it->second.size) {
      it->second.uses.insert(&stream);
    }
  }
}

PinnedStats pinned_stats() {
  Lock lock(Engine::get().mutex);
  return memory().stats;
}

void reset_pinned_peak() {
  Lock lock(Engine::get().mutex);
  memory().stats.peak = memory().stats.allocated;
}

void empty_pinned_cache() {
  pinned_allocator()->empty_cache();
}

REGISTER_HOST_ALLOCATOR(c10::DeviceType::PrivateUse1, pinned_allocator());

} // namespace tide
