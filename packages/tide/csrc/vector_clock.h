// A vector clock: for each agent (the host, and every stream) the number of its
// actions that are known to have happened before this point.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace tide {

class VectorClock {
 public:
  uint64_t at(int agent) const {
    return static_cast<size_t>(agent) < ticks_.size() ? ticks_[agent] : 0;
  }

  void set(int agent, uint64_t tick) {
    if (static_cast<size_t>(agent) >= ticks_.size()) {
      ticks_.resize(agent + 1, 0);
    }
    ticks_[agent] = tick;
  }

  uint64_t advance(int agent) {
    const uint64_t tick = at(agent) + 1;
    set(agent, tick);
    return tick;
  }

  void join(const VectorClock& other) {
    if (other.ticks_.size() > ticks_.size()) {
      ticks_.resize(other.ticks_.size(), 0);
    }
    for (size_t i = 0; i < other.ticks_.size(); ++i) {
      if (other.ticks_[i] > ticks_[i]) {
        ticks_[i] = other.ticks_[i];
      }
    }
  }

  bool covers(int agent, uint64_t tick) const {
    return at(agent) >= tick;
  }

 private:
  std::vector<uint64_t> ticks_;
};

} // namespace tide
