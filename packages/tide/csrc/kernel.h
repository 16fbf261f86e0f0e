// Issue of one kernel with known outputs: the path of everything written by hand here.
#pragma once

#include "alias.h"
#include "engine.h"

#include <functional>
#include <vector>

namespace tide {

struct Kernel {
  const char* name = "";
  std::vector<at::Tensor> reads; // undefined ones are skipped
  std::vector<at::Tensor> writes;
  int64_t flops = 0;
  bool needs_host = false; // the kernel uses the host's state (random numbers): never queued
};

// Calls `body` with CPU tensors over the same bytes, reads then writes, at the kernel's place in the
// current stream.
using KernelBody = std::function<void(const std::vector<at::Tensor>& reads, std::vector<at::Tensor>& writes)>;
void launch(const Kernel& kernel, KernelBody body);


} // namespace tide
