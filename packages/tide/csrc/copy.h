// Copies: between host and device over a link, and inside a device.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>

namespace tide {

// A plain copy inside one device, at its place in the current stream.
void copy_bytes_on_device(
    c10::DeviceIndex device, void* destination, const void* source, size_t bytes);

} // namespace tide
