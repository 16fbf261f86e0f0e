// The host's own reads and writes of pinned memory.
#pragma once

namespace tide {

// Watches every operator that runs on CPU tensors and reports to the race detector those that
// touch pinned memory. What does not go through torch (numpy, raw pointers) is not seen.
void observe_host(bool on);

} // namespace tide
