// What an operator's schema tells about it.
#pragma once

#include "flops.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>
#include <vector>

namespace tide {

struct Traits {
  std::string name; // without the overload
  FlopCount flops = nullptr;
  std::vector<bool> writes; // by argument
  std::vector<bool> outs;
  int generator = -1; // which argument
  bool hidden_random = false; // draws numbers without saying from where
  bool view = false;
  bool only_writes = false; // returns nothing but what it was given to write
  bool host_waits = false;
  bool mixes_devices = false; // host tensors are welcome
};

// Found once for each operator.
const Traits& traits_of(const c10::OperatorHandle& op);

} // namespace tide
