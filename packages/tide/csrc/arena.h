// A reserved range of addresses, handed out first fit. Real pages come and go behind it.
//
// Addresses decide ties in a best-fit allocator. Taking them from the operating system would make
// fragmentation differ from run to run; offsets in a range of our own are always the same.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace tide {

class Arena {
 public:
  explicit Arena(size_t size);
  void* take(size_t size); // multiples of the page size; the bytes read as zero
  void give(void* start, size_t size);
  bool contains(const void* pointer) const {
    const auto at = reinterpret_cast<uintptr_t>(pointer);
    return at >= base_ && at < base_ + size_;
  }

 private:
  uintptr_t base_ = 0;
  size_t size_ = 0;
  std::map<uintptr_t, size_t> free_;
};

} // namespace tide
