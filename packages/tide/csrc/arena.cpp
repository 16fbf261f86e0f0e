#include "arena.h"

#include <c10/util/Exception.h>

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <iterator>

namespace tide {

Arena::Arena(size_t size) : size_(size) {
  void* start = mmap(
      nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TORCH_CHECK(
      start != MAP_FAILED,
      "tide: could not reserve ", size, " bytes of address space: ", std::strerror(errno));
  base_ = reinterpret_cast<uintptr_t>(start);
  free_[base_] = size;
}

void* Arena::take(size_t size) {
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second < size) {
      continue;
    }
    const uintptr_t start = it->first;
    const size_t rest = it->second - size;
    free_.erase(it);
    if (rest > 0) {
      free_[start + size] = rest;
    }
    void* pointer = reinterpret_cast<void*>(start);
    TORCH_CHECK(
        mprotect(pointer, size, PROT_READ | PROT_WRITE) == 0,
        "tide: the host could not back ", size, " bytes: ", std::strerror(errno));
    return pointer;
  }
  TORCH_CHECK(false, "tide: no address range of ", size, " bytes is left");
}

void Arena::give(void* pointer, size_t size) {
  madvise(pointer, size, MADV_DONTNEED);
  mprotect(pointer, size, PROT_NONE);
  auto it = free_.emplace(reinterpret_cast<uintptr_t>(pointer), size).first;
  const auto next = std::next(it);
  if (next != free_.end() && it->first + it->second == next->first) {
    it->second += next->second;
    free_.erase(next);
  }
  if (it != free_.begin()) {
    const auto previous = std::prev(it);
    if (previous->first + previous->second == it->first) {
      previous->second += it->second;
      free_.erase(it);
    }
  }
}

} // namespace tide
