// One collective on its way.
#pragma once

#include "collective.h"

namespace tide {

class TideWork final : public c10d::Work {
 public:
  TideWork(int rank, Plan plan, Lane& lane);

  bool isCompleted() override;
  bool isSuccess() const override;
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override;
  void blockCurrentStream() override {
    synchronize();
  }
  std::vector<at::Tensor> result() override {
    return results;
  }
  int sourceRank() const override {
    return source;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  // Waits for gloo, writes the outputs, settles the clock. Does so for earlier works of the lane first.
  void finish();
  bool writes_into(const at::Tensor& tensor) const;

  Plan plan;
  Lane& lane;
  Traffic traffic;
  c10::intrusive_ptr<c10d::Backend> clock_backend;
  c10::intrusive_ptr<c10d::Work> data;
  c10::intrusive_ptr<c10d::Work> clock;
  HostTensors host_inputs;
  HostTensors host_outputs;
  std::vector<at::Tensor> results; // kept after the plan's tensors are let go
  at::Tensor ready; // int64: this rank's ready time; afterwards the latest of all
  Moment moment; // issue order now; the end's time once finished
  Nanoseconds ready_here = 0;
  int source = -1;
  std::atomic<bool> finished{false};

 private:
  void complete();
  c10::DeviceIndex device() const {
    return lane.stream->device;
  }
  c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::exception_ptr error_;
};

} // namespace tide
