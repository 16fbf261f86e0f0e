// Pinned host memory: a caching allocator of its own, with a cap of its own.
//
// Sizes round up to powers of two, as CUDA's host allocator does. A block freed while a copy
// uses it is kept until the host could have seen the copy end.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>

namespace at {
struct HostAllocator;
}

namespace tide {

struct StreamState;

struct PinnedStats {
  int64_t allocated = 0;
  int64_t reserved = 0;
  int64_t peak = 0;
  int64_t allocations = 0;
};

at::HostAllocator* pinned_allocator();
bool is_pinned(const void* pointer);
// A copy on `stream` uses the block around `pointer`. Lock held.
void record_pinned_use(const void* pointer, StreamState& stream);
PinnedStats pinned_stats();
void reset_pinned_peak();
void empty_pinned_cache();

} // namespace tide
