// The Python stack of a captured action, in words.
#pragma once

#include "race.h"

#include <cstdint>
#include <string>
#include <vector>

namespace tide {

struct StackFrame {
  std::string file;
  uint64_t line = 0;
  std::string function;
};

// Innermost first. Takes the GIL.
std::vector<StackFrame> frames_of(const Origin& origin);

} // namespace tide
