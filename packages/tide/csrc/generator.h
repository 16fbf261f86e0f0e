// The device's random numbers: a generator of its own, on the CPU's engine.
#pragma once

#include <ATen/core/Generator.h>

namespace tide {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);
// The CPU generator inside: what a CPU kernel is given in place of the device's.
at::Generator engine_of(const at::Generator& generator);

} // namespace tide
