#include "allocator.h"

#include <c10/util/Exception.h>

#include <cstring>

namespace tide {
namespace {

using c10::CachingAllocator::format_size;
using c10::CachingAllocator::StatType;

constexpr size_t kRound = 512;
constexpr size_t kSmallRequest = 1 << 20;
constexpr size_t kSmallSegment = 2 << 20;
constexpr size_t kMiddleRequest = 10 << 20;
constexpr size_t kMiddleSegment = 20 << 20;
constexpr size_t kLargeRound = 2 << 20;
constexpr size_t kArena = size_t{512} << 30;

size_t round_up(size_t size, size_t to) {
  return (size + to - 1) / to * to;
}

size_t segment_size(size_t size) {
  if (size <= kSmallRequest) {
    return kSmallSegment;
  }
  return size < kMiddleRequest ? kMiddleSegment : round_up(size, kLargeRound);
}

} // namespace

DeviceMemory& device_memory(c10::DeviceIndex device) {
  static auto* memories = [] {
    auto* all = new std::vector<std::unique_ptr<DeviceMemory>>();
    for (int i = 0; i < device_count(); ++i) {
      all->push_back(std::make_unique<DeviceMemory>(static_cast<c10::DeviceIndex>(i)));
    }
    return all;
  }();
  return *memories->at(device);
}

DeviceMemory::DeviceMemory(c10::DeviceIndex device) : device_(device), arena_(kArena) {}

bool DeviceMemory::Order::operator()(const Block* a, const Block* b) const {
  if (a->stream != b->stream) {
    return a->stream->agent < b->stream->agent;
  }
  return a->size != b->size ? a->size < b->size : a->start < b->start;
}

template <typename F>
void DeviceMemory::count(bool small, F change) {
  change(static_cast<size_t>(StatType::AGGREGATE));
  change(static_cast<size_t>(small ? StatType::SMALL_POOL : StatType::LARGE_POOL));
}

Block* DeviceMemory::find(Lock& lock, size_t requested, StreamState& stream) {
  Engine& engine = Engine::get();
  Faults& faults = engine.faults;
  ++faults.allocations_seen;
  if (faults.allocations_seen == faults.fail_allocation) {
    ++stats.num_ooms;
    return nullptr;
  }
  if (faults.allocations_seen == faults.shrink_allocation) {
    faults.allocated_limit = std::max<int64_t>(
        0, stats.allocated_bytes[0].current - faults.shrink_bytes);
  }

  const size_t size = round_up(std::max<size_t>(requested, 1), kRound);
  reclaim_finished();
  const auto attempt = [&]() -> Block* {
    if (faults.allocated_limit >= 0 &&
        stats.allocated_bytes[0].current + static_cast<int64_t>(size) > faults.allocated_limit) {
      return nullptr;
    }
    Block* block = find_free(size, stream);
    return block ? block : new_segment(size, stream);
  };
  Block* block = attempt();
  if (!block) {
    // As CUDA's allocator does: wait for what is held back by other streams, give cached
    // segments back, try once more.
    ++stats.num_alloc_retries;
    wait_for_uses(lock);
    block = attempt();
    if (!block && release_segments(lock)) {
      block = attempt();
    }
  }
  if (!block) {
    ++stats.num_ooms;
    return nullptr;
  }
  return hand_out(block, size, requested);
}

Block* DeviceMemory::find_free(size_t size, StreamState& stream) {
  Pool& free = pool(size <= kSmallRequest);
  Block key;
  key.stream = &stream;
  key.size = size;
  const auto it = free.lower_bound(&key);
  if (it == free.end() || (*it)->stream != &stream) {
    return nullptr;
  }
  Block* block = *it;
  free.erase(it);
  return block;
}

Block* DeviceMemory::new_segment(size_t size, StreamState& stream) {
  const size_t bytes = segment_size(size);
  const auto reserved = static_cast<size_t>(stats.reserved_bytes[0].current);
  if (reserved + bytes > static_cast<size_t>(Engine::get().options.capacity)) {
    return nullptr;
  }
  auto* block = new Block();
  block->stream = &stream;
  block->start = reinterpret_cast<uintptr_t>(arena_.take(bytes));
  block->size = bytes;
  block->small = size <= kSmallRequest;
  ++stats.num_device_alloc;
  count(block->small, [&](size_t i) {
    stats.segment[i].increase(1);
    stats.reserved_bytes[i].increase(bytes);
  });
  return block;
}

Block* DeviceMemory::hand_out(Block* block, size_t size, size_t requested) {
  const bool was_split = block->previous || block->next;
  const size_t rest = block->size - size;
  const bool split = block->small ? rest >= kRound : rest > kSmallRequest;
  if (was_split) {
    count(block->small, [&](size_t i) {
      stats.inactive_split[i].decrease(1);
      stats.inactive_split_bytes[i].decrease(block->size);
    });
  }
  if (split) {
    auto* remaining = new Block();
    remaining->stream = block->stream;
    remaining->start = block->start + size;
    remaining->size = rest;
    remaining->small = block->small;
    remaining->previous = block;
    remaining->next = block->next;
    if (remaining->next) {
      remaining->next->previous = remaining;
    }
    block->next = remaining;
    block->size = size;
    pool(block->small).insert(remaining);
    count(block->small, [&](size_t i) {
      stats.inactive_split[i].increase(1);
      stats.inactive_split_bytes[i].increase(rest);
    });
  }
  block->allocated = true;
  block->requested = requested;
  allocated_[block->start] = block;
  count(block->small, [&](size_t i) {
    stats.allocation[i].increase(1);
    stats.allocated_bytes[i].increase(block->size);
    stats.active[i].increase(1);
    stats.active_bytes[i].increase(block->size);
    stats.requested_bytes[i].increase(requested);
  });
  sample();
  return block;
}

Block* DeviceMemory::block_at(uintptr_t start) {
  const auto it = allocated_.find(start);
  return it == allocated_.end() ? nullptr : it->second;
}

void DeviceMemory::use(uintptr_t start, StreamState& stream) {
  Block* block = block_at(start);
  if (block && block->stream != &stream) {
    block->uses.insert(&stream);
  }
}

void DeviceMemory::release(Block* block) {
  block->allocated = false;
  allocated_.erase(block->start);
  count(block->small, [&](size_t i) {
    stats.allocation[i].decrease(1);
    stats.allocated_bytes[i].decrease(block->size);
    stats.requested_bytes[i].decrease(block->requested);
  });
  sample();
  if (block->uses.empty()) {
    recycle(block);
    return;
  }
  for (StreamState* stream : block->uses) {
    block->waits.push_back(Engine::get().mark(*stream));
  }
  block->uses.clear();
  block->pending = true;
  pending_.push_back(block);
}

void DeviceMemory::poison(Block* block) {
  Engine& engine = Engine::get();
  if (!engine.options.poison) {
    return;
  }
  void* start = reinterpret_cast<void*>(block->start);
  const size_t size = block->size;
  if (engine.asynchronous()) {
    // At its place in the stream: what was queued there before may still use the bytes.
    block->stream->worker.submit([start, size] { std::memset(start, kPoison, size); });
  } else {
    std::memset(start, kPoison, size);
  }
}

void DeviceMemory::recycle(Block* block) {
  poison(block);
  block->pending = false;
  count(block->small, [&](size_t i) {
    stats.active[i].decrease(1);
    stats.active_bytes[i].decrease(block->size);
  });
  merge(block, block->previous);
  merge(block, block->next);
  pool(block->small).insert(block);
  if (block->previous || block->next) {
    count(block->small, [&](size_t i) {
      stats.inactive_split[i].increase(1);
      stats.inactive_split_bytes[i].increase(block->size);
    });
  }
}

void DeviceMemory::merge(Block* into, Block* neighbour) {
  if (!neighbour || neighbour->allocated || neighbour->pending) {
    return;
  }
  pool(into->small).erase(neighbour);
  count(into->small, [&](size_t i) {
    stats.inactive_split[i].decrease(1);
    stats.inactive_split_bytes[i].decrease(neighbour->size);
  });
  if (neighbour == into->previous) {
    into->start = neighbour->start;
    into->previous = neighbour->previous;
    if (into->previous) {
      into->previous->next = into;
    }
  } else {
    into->next = neighbour->next;
    if (into->next) {
      into->next->previous = into;
    }
  }
  into->size += neighbour->size;
  delete neighbour;
}

void DeviceMemory::reclaim_finished() {
  Engine& engine = Engine::get();
  for (auto it = pending_.begin(); it != pending_.end();) {
    Block* block = *it;
    bool over = true;
    for (const Moment& moment : block->waits) {
      over = over && engine.passed(moment);
    }
    if (!over) {
      ++it;
      continue;
    }
    for (const Moment& moment : block->waits) {
      engine.land_covered(moment.seen);
      engine.races.settle(block->start, block->start + block->size, moment.seen);
    }
    block->waits.clear();
    it = pending_.erase(it);
    recycle(block);
  }
}

void DeviceMemory::wait_for_uses(Lock& lock) {
  if (pending_.empty()) {
    return;
  }
  Engine& engine = Engine::get();
  ++stats.num_sync_all_streams;
  std::vector<Moment> moments;
  for (Block* block : pending_) {
    moments.insert(moments.end(), block->waits.begin(), block->waits.end());
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

bool DeviceMemory::release_segments(Lock& lock) {
  // Out of the pools first, so that nobody can be given them while the streams are waited for.
  std::vector<Block*> whole;
  for (Pool* free : {&small_, &large_}) {
    for (auto it = free->begin(); it != free->end();) {
      if (!(*it)->previous && !(*it)->next) {
        whole.push_back(*it);
        it = free->erase(it);
      } else {
        ++it;
      }
    }
  }
  if (whole.empty()) {
    return false;
  }
  // Giving memory back to the driver waits for the device.
  Engine& engine = Engine::get();
  if (engine.asynchronous()) {
    lock.unlock();
    for (StreamState* stream : engine.streams(device_)) {
      stream->worker.wait(stream->worker.last());
    }
    lock.lock();
  }
  engine.host_sees_all(device_);
  for (Block* block : whole) {
    engine.races.forget(block->start, block->start + block->size);
    arena_.give(reinterpret_cast<void*>(block->start), block->size);
    ++stats.num_device_free;
    count(block->small, [&](size_t i) {
      stats.segment[i].decrease(1);
      stats.reserved_bytes[i].decrease(block->size);
    });
    delete block;
  }
  sample();
  return true;
}

void DeviceMemory::empty_cache(Lock& lock) {
  wait_for_uses(lock);
  release_segments(lock);
}

size_t DeviceMemory::free_bytes() const {
  const auto reserved = stats.reserved_bytes[0].current;
  return static_cast<size_t>(std::max<int64_t>(0, Engine::get().options.capacity - reserved));
}

std::string DeviceMemory::out_of_memory(size_t requested) const {
  const auto allocated = static_cast<size_t>(stats.allocated_bytes[0].current);
  const auto reserved = static_cast<size_t>(stats.reserved_bytes[0].current);
  return c10::str(
      "tide out of memory. Tried to allocate ", format_size(requested), ". Device ",
      static_cast<int>(device_), " has a total capacity of ",
      format_size(static_cast<size_t>(Engine::get().options.capacity)), " of which ",
      format_size(free_bytes()), " is free. Of the allocated memory ", format_size(allocated),
      " is allocated by PyTorch, and ", format_size(reserved - allocated),
      " is reserved by PyTorch but unallocated.");
}

void DeviceMemory::sample() {
  Engine& engine = Engine::get();
  if (engine.timeline.recording) {
    engine.timeline.memory.push_back(
        {device_, engine.now(), stats.allocated_bytes[0].current, stats.reserved_bytes[0].current});
  }
}

} // namespace tide
