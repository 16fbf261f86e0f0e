#include "work.h"

#include "alias.h"
#include "below.h"

#include <ATen/core/ivalue_inl.h>
#include <c10/core/StreamGuard.h>

namespace tide {

TideWork::TideWork(int rank, Plan what, Lane& where)
    : c10d::Work(rank, what.type), plan(std::move(what)), lane(where), results(plan.outputs) {}

bool TideWork::isCompleted() {
  return finished || ((!data || data->isCompleted()) && (!clock || clock->isCompleted()));
}

bool TideWork::isSuccess() const {
  return !error_;
}

bool TideWork::writes_into(const at::Tensor& tensor) const {
  for (const at::Tensor& output : plan.outputs) {
    if (output.storage().data() == tensor.storage().data()) {
      return true;
    }
  }
  return false;
}

void TideWork::finish() {
  if (finished) {
    return;
  }
  std::lock_guard<std::mutex> one(lane.finishing);
  while (!finished) {
    c10::intrusive_ptr<TideWork> next;
    {
      std::lock_guard<std::mutex> lock(lane.mutex);
      next = lane.unfinished.front();
      lane.unfinished.pop_front();
    }
    next->complete();
  }
}

void TideWork::complete() {
  try {
    if (data) {
      data->wait();
      source = plan.receives_from == kAnySource ? data->sourceRank() : plan.receives_from;
    }
    if (plan.receives_from == kAnySource) {
      HostTensors buffer{ready};
      clock = clock_backend->recv(buffer, source, plan.tag);
    }
    // A sender learns nothing from this, but gloo drops a message whose work dies before it left.
    clock->wait();
  } catch (...) {
    error_ = std::current_exception();
    finished = true;
    return;
  }
  Engine& engine = Engine::get();
  if (!plan.outputs.empty()) {
    engine.run(*lane.stream, [&] {
      const BelowEverything below;
      AliasSet aliases;
      for (size_t i = 0; i < plan.outputs.size(); ++i) {
        aliases.of(plan.outputs[i]).copy_(host_outputs[i]);
      }
    });
  }
  {
    Lock lock(engine.mutex);
    if (lane.resets != engine.resets()) {
      lane.resets = engine.resets();
      lane.free_at = 0;
    }
    const Nanoseconds duration =
        fabric_duration(engine.machine, traffic, engine.options.efficiency_seed);
    const Nanoseconds latest =
        plan.sends_to < 0 ? std::max(ready_here, ready.item<int64_t>()) : ready_here;
    const Nanoseconds start = std::max(latest, lane.free_at);
    lane.free_at = start + duration;
    lane.stream->idle_at = std::max(lane.stream->idle_at, lane.free_at);
    moment.time = lane.free_at;
    if (engine.timeline.recording) {
      const char* name = plan.sends_to >= 0 ? "fabric out" : plan.receives_from != -1 ? "fabric in" : "fabric";
      engine.timeline.spans.push_back({plan.name, name, device(), start, duration, plan.bytes, 0});
    }
  }
  // What was held until now may go, as NCCL lets go of it at the wait.
  plan.inputs.clear();
  plan.outputs.clear();
  host_inputs.clear();
  host_outputs.clear();
  finished = true;
}

bool TideWork::wait(std::chrono::milliseconds) {
  synchronize();
  return true;
}

void TideWork::synchronize() {
  finish();
  if (error_) {
    std::rethrow_exception(error_);
  }
  Engine& engine = Engine::get();
  {
    Lock lock(engine.mutex);
    engine.wait(engine.current_stream(device()), moment);
  }
  if (plan.blocks_host) {
    engine.wait_host(moment);
  }
}

c10::intrusive_ptr<c10::ivalue::Future> TideWork::getFuture() {
  // Completed at once, in real time; in virtual time it ends when the collective does, because the
  // future records its events on the collective's stream.
  finish();
  if (!future_) {
    const c10::Device where(c10::DeviceType::PrivateUse1, device());
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{where});
    const c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, where, lane.stream->id));
    if (error_) {
      future->setError(error_);
    } else {
      future->markCompleted(c10::IValue(results));
    }
    future_ = future;
  }
  return future_;
}

} // namespace tide
