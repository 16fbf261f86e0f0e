// The race detector: who touched which bytes last, and was it ordered before this access?
//
// Accesses are compared by vector clocks when they are issued, so a report does not depend on
// how long anything takes. The detector keeps, for every touched byte range of device and pinned
// memory, the last write and the reads since then.
#pragma once

#include "vector_clock.h"

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace torch {
struct CapturedTraceback;
}

namespace tide {

constexpr int kHost = 0; // the host's number among the agents of a vector clock

struct Access {
  uintptr_t begin = 0;
  uintptr_t end = 0;
  bool write = false;
};

// One issued action, as a report names it.
struct Origin {
  std::string what; // operator, "copy host to device", "allocate", ...
  std::string node; // the autograd node that was running, if any
  int agent = kHost;
  std::shared_ptr<torch::CapturedTraceback> stack;
};
using OriginPtr = std::shared_ptr<const Origin>;

// Captures the Python stack. Takes the GIL, so never with one of our locks held.
OriginPtr capture_origin(std::string what, int agent);

struct Report {
  std::string kind; // "write after write", "read after write", "write after read"
  OriginPtr first;
  OriginPtr second;
  uintptr_t begin = 0;
  uintptr_t end = 0;
};

class RaceDetector {
 public:
  // Checks one access and remembers it. Returns the earlier actions it raced with.
  std::vector<OriginPtr> access(
      const Access&, int agent, uint64_t tick, const VectorClock& seen, const OriginPtr&);
  // The range was given back: whatever happened to it is history.
  void forget(uintptr_t begin, uintptr_t end);
  // Somebody waited until everything in `seen` was over before handing the range on.
  void settle(uintptr_t begin, uintptr_t end, const VectorClock& seen);

  const std::vector<Report>& reports() const {
    return reports_;
  }
  void clear_reports() {
    reports_.clear();
  }
  void clear() {
    ranges_.clear();
    reports_.clear();
  }

 private:
  struct Touch {
    int agent = -1;
    uint64_t tick = 0;
    OriginPtr origin;
  };
  struct Range {
    uintptr_t end = 0;
    Touch write;
    std::vector<Touch> reads; // the last read of each agent since the write
  };
  using Ranges = std::map<uintptr_t, Range>;

  void split(uintptr_t at);
  void report(const char* kind, const Touch& first, const OriginPtr& second, const Access&);

  Ranges ranges_;
  std::vector<Report> reports_;
};

} // namespace tide
