#include "kernel.h"

#include "below.h"

#include <c10/core/DeviceGuard.h>

namespace tide {

void launch(const Kernel& kernel, KernelBody body) {
  check_fork();
  const at::Tensor& anchor = kernel.writes.front();
  const c10::OptionalDeviceGuard guard(anchor.device());
  Engine& engine = Engine::get();
  StreamState& stream = engine.current_stream(anchor.device().index());
  AliasSet aliases;
  std::vector<at::Tensor> reads;
  std::vector<at::Tensor> writes;
  std::vector<Access> accesses;
  Work work;
  work.flops = kernel.flops;
  work.dtype = (kernel.reads.empty() ? anchor : kernel.reads.front()).scalar_type();
  for (const at::Tensor& tensor : kernel.reads) {
    reads.push_back(tensor.defined() ? aliases.of(tensor) : at::Tensor());
    if (tensor.defined()) {
      add_accesses(tensor, false, accesses);
      work.bytes += bytes_of(tensor);
    }
  }
  for (const at::Tensor& tensor : kernel.writes) {
    writes.push_back(tensor.defined() ? aliases.of(tensor) : at::Tensor());
    if (tensor.defined()) {
      add_accesses(tensor, true, accesses);
      work.bytes += bytes_of(tensor);
    }
  }
  const auto origin = origin_of(kernel.name, &stream);
  Turn turn(stream);
  {
    Lock lock(engine.mutex);
    const Issue issue = engine.begin(stream, accesses, origin);
    engine.finish_kernel(issue, kernel.name, work, false);
  }
  auto job = [body = std::move(body), reads = std::move(reads), writes = std::move(writes)]() mutable {
    const BelowEverything below;
    body(reads, writes);
  };
  if (kernel.needs_host) {
    engine.run(stream, job);
  } else {
    engine.submit(stream, std::move(job));
  }
}

} // namespace tide
