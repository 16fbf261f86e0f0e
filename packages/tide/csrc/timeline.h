// What happened when, for export as a trace.
#pragma once

#include "machine.h"

#include <cstdint>
#include <string>
#include <vector>

namespace tide {

struct Span {
  std::string name;
  std::string lane; // "stream 3", "link in", "host", ...
  int device = 0;
  Nanoseconds start = 0;
  Nanoseconds duration = 0;
  int64_t bytes = 0;
  int64_t flops = 0;
};

struct MemorySample {
  int device = 0;
  Nanoseconds time = 0; // on the host's clock: allocation is a host action
  int64_t allocated = 0;
  int64_t reserved = 0;
};

struct Timeline {
  bool recording = false;
  std::vector<Span> spans;
  std::vector<MemorySample> memory;
};

} // namespace tide
