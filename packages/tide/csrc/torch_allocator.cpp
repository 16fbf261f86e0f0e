// The allocator as torch sees it: a c10::DeviceAllocator over DeviceMemory.
#include "allocator.h"

#include <c10/util/Exception.h>

#include <array>

namespace tide {
namespace {

std::mutex callback_mutex;
FailureCallback callback_on_failure;

FailureCallback failure_callback() {
  std::lock_guard<std::mutex> lock(callback_mutex);
  return callback_on_failure;
}

} // namespace

void set_failure_callback(FailureCallback callback) {
  std::lock_guard<std::mutex> lock(callback_mutex);
  std::swap(callback_on_failure, callback);
}

namespace {

void delete_block(void* pointer) {
  if (!pointer || in_forked_child()) {
    return;
  }
  const auto start = reinterpret_cast<uintptr_t>(pointer);
  int64_t size = 0;
  int64_t allocated = 0;
  int64_t reserved = 0;
  c10::DeviceIndex device = 0;
  {
    Lock lock(Engine::get().mutex);
    for (; device < device_count(); ++device) {
      DeviceMemory& memory = device_memory(device);
      if (Block* block = memory.block_at(start)) {
        size = static_cast<int64_t>(block->size);
        memory.release(block);
        allocated = memory.stats.allocated_bytes[0].current;
        reserved = memory.stats.reserved_bytes[0].current;
        break;
      }
    }
  }
  c10::reportMemoryUsageToProfiler(
      pointer, -size, allocated, reserved, c10::Device(c10::DeviceType::PrivateUse1, device));
}

struct TideAllocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    return allocate_on(current_device(), bytes);
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &delete_block;
  }

  void copy_data(void* destination, const void* source, size_t count) const override {
    Engine::get().synchronize(-1);
    default_copy_data(destination, source, count);
  }

  bool initialized() override {
    return true;
  }

  void emptyCache(c10::MempoolId_t) override {
    Lock lock(Engine::get().mutex);
    for (int device = 0; device < device_count(); ++device) {
      device_memory(static_cast<c10::DeviceIndex>(device)).empty_cache(lock);
    }
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (!pointer.get()) {
      return;
    }
    Engine& engine = Engine::get();
    StreamState& state = engine.stream(stream.device_index(), stream.id());
    Lock lock(engine.mutex);
    device_memory(pointer.device().index())
        .use(reinterpret_cast<uintptr_t>(pointer.get_context()), state);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(Engine::get().mutex);
    return device_memory(device).stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock(Engine::get().mutex);
    auto& s = device_memory(device).stats;
    for (auto* array : arrays(s)) {
      for (auto& stat : *array) {
        stat.reset_accumulated();
      }
    }
    s.num_alloc_retries = s.num_ooms = s.num_sync_all_streams = 0;
    s.num_device_alloc = s.num_device_free = 0;
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(Engine::get().mutex);
    for (auto* array : arrays(device_memory(device).stats)) {
      for (auto& stat : *array) {
        stat.reset_peak();
      }
    }
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(Engine::get().mutex);
    return {device_memory(device).free_bytes(), Engine::get().options.capacity};
  }

 private:
  static std::array<c10::CachingAllocator::StatArray*, 9> arrays(
      c10::CachingDeviceAllocator::DeviceStats& s) {
    return {&s.allocation, &s.segment, &s.active, &s.inactive_split, &s.allocated_bytes,
            &s.reserved_bytes, &s.active_bytes, &s.inactive_split_bytes, &s.requested_bytes};
  }
};

} // namespace

c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes) {
  check_fork();
  const c10::Device where(c10::DeviceType::PrivateUse1, device);
  if (bytes == 0) {
    return {nullptr, nullptr, &delete_block, where};
  }
  Engine& engine = Engine::get();
  StreamState& stream = engine.current_stream(device);
  DeviceMemory& memory = device_memory(device);
  const OriginPtr origin = origin_of("allocate", &stream);
  while (true) {
    std::string message;
    int64_t allocated = 0;
    int64_t reserved = 0;
    {
      Lock lock(engine.mutex);
      Block* block = memory.find(lock, bytes, stream);
      allocated = memory.stats.allocated_bytes[0].current;
      reserved = memory.stats.reserved_bytes[0].current;
      if (block) {
        // Whoever still uses the bytes on another stream races with their new owner.
        engine.begin(stream, {{block->start, block->start + block->size, true}}, origin);
        void* start = reinterpret_cast<void*>(block->start);
        const auto size = static_cast<int64_t>(block->size);
        lock.unlock();
        c10::reportMemoryUsageToProfiler(start, size, allocated, reserved, where);
        return {start, start, &delete_block, where};
      }
      message = memory.out_of_memory(bytes);
    }
    c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(bytes), allocated, reserved, where);
    const FailureCallback make_room = failure_callback();
    if (make_room && make_room(bytes, device)) {
      continue;
    }
    TORCH_CHECK_WITH(OutOfMemoryError, false, message);
  }
}

c10::DeviceAllocator* device_allocator() {
  static auto* allocator = new TideAllocator();
  return allocator;
}

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, device_allocator());

} // namespace tide
