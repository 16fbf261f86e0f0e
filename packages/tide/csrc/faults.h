// Faults a test can arm. Counts start at one, from the moment of arming; 0 means not armed.
#pragma once

#include "machine.h"

#include <cstdint>

namespace tide {

struct Faults {
  int64_t allocations_seen = 0;
  int64_t fail_allocation = 0; // this allocation fails

  int64_t shrink_allocation = 0; // at this allocation ...
  int64_t shrink_bytes = 0; // ... the capacity becomes what is allocated less this
  int64_t allocated_limit = -1; // the capacity so found

  int64_t copies_seen = 0;
  int64_t fail_copy = 0; // this copy raises
  int64_t delay_copy = 0; // this copy takes `delay` longer
  Nanoseconds delay = 0;
  int64_t reorder_copy = 0; // this copy is overtaken by the next one on its link

  bool pinned_exhausted = false;
};

} // namespace tide
