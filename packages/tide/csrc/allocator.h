// Device memory: a caching allocator with the rules of CUDA's, and a hard capacity.
//
// Requests round to 512 bytes. Up to 1 MiB they are cut from 2 MiB segments, up to 10 MiB from
// 20 MiB segments, above that a segment of their own in steps of 2 MiB. Free blocks are found by
// best fit, split, merged with their neighbours, and belong to the stream they were allocated on:
// a block freed there is reusable there at once. Uses on other streams (`record_stream`) hold a
// freed block back until the host could have seen them end.
#pragma once

#include "arena.h"
#include "engine.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <functional>
#include <list>
#include <set>
#include <unordered_map>

namespace tide {

struct Block {
  StreamState* stream = nullptr;
  uintptr_t start = 0;
  size_t size = 0;
  size_t requested = 0;
  bool small = false;
  bool allocated = false;
  bool pending = false; // freed, waiting for uses on other streams
  Block* previous = nullptr; // neighbours in the segment
  Block* next = nullptr;
  std::set<StreamState*> uses;
  std::vector<Moment> waits;
};

class DeviceMemory {
 public:
  explicit DeviceMemory(c10::DeviceIndex device);

  // One attempt: what is free, else a new segment, else what can be reclaimed. Null when out
  // of memory. May let go of the lock while it waits for streams.
  Block* find(Lock&, size_t requested, StreamState&);
  void release(Block*); // lock held
  void use(uintptr_t start, StreamState&); // lock held: record_stream
  Block* block_at(uintptr_t start);
  void empty_cache(Lock&);
  std::string out_of_memory(size_t requested) const;

  c10::CachingDeviceAllocator::DeviceStats stats;
  size_t free_bytes() const;

 private:
  struct Order {
    bool operator()(const Block* a, const Block* b) const;
  };
  using Pool = std::set<Block*, Order>;

  Block* find_free(size_t size, StreamState&);
  Block* new_segment(size_t size, StreamState&);
  Block* hand_out(Block*, size_t size, size_t requested);
  void recycle(Block*); // back into its pool, merged
  void merge(Block* into, Block* neighbour);
  void reclaim_finished();
  void wait_for_uses(Lock&);
  bool release_segments(Lock&);
  void poison(Block*);
  void sample();
  Pool& pool(bool small) {
    return small ? small_ : large_;
  }
  template <typename F>
  void count(bool small, F change);

  c10::DeviceIndex device_;
  Arena arena_;
  Pool small_;
  Pool large_;
  std::unordered_map<uintptr_t, Block*> allocated_;
  std::list<Block*> pending_;
};

DeviceMemory& device_memory(c10::DeviceIndex);

// Called when an allocation has failed, with no lock held; true means "try again".
using FailureCallback = std::function<bool(size_t bytes, c10::DeviceIndex device)>;
void set_failure_callback(FailureCallback);

c10::DeviceAllocator* device_allocator();
c10::DataPtr allocate_on(c10::DeviceIndex device, size_t bytes);

} // namespace tide
