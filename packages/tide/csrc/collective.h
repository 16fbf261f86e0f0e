// Collectives for device tensors, staged through gloo, with virtual clocks.
//
// [Note: collectives]
//
// A collective has a stream of its own, as NCCL's do: it waits for the caller's stream when it is
// issued, and `Work::wait` makes the caller's stream wait for it. Its inputs are read at issue
// into host memory, gloo works on that, and the outputs are written when somebody waits. A program
// that uses an output before waiting finds old bytes and is reported.
//
// Time: each rank says when it was ready; the collective starts when the last one is, or when the
// one before it in the same group has ended, and takes a time from its bytes and the wires. All
// ranks of a group see the same sequence, so all compute the same end. Ready times travel
// over a gloo group of their own, which leaves tags and order of the data alone. A receive starts when
// both sides are ready; a send is buffered and does not wait for its receiver.
//
// Wires: with `devices_per_node`, ranks of neighbouring numbers share a node. Inside it they use the
// fabric. A ring over several nodes passes every node's border once for each member there, through
// as many network ports, and is as slow as the slowest wire. In an all-to-all each rank sends what
// is for other nodes through its own port.
//
// Ends become known when a work is finished, in the order of issue: `Lane` holds what is not
// finished. Sends and receives with each peer are lanes of their own, since a send may only
// complete after a receive posted later.
#pragma once

#include "engine.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <deque>
#include <functional>
#include <map>

namespace tide {

class TideWork;

// Works that follow each other: one stream, one clock.
struct Lane {
  StreamState* stream = nullptr;
  Nanoseconds free_at = 0;
  uint64_t resets = 0; // the clock `free_at` belongs to
  std::mutex finishing; // one thread finishes works, in order
  std::mutex mutex; // guards the queue
  std::deque<c10::intrusive_ptr<TideWork>> unfinished;
};

using HostTensors = std::vector<at::Tensor>;
// Starts the operation on host tensors.
using Start = std::function<c10::intrusive_ptr<c10d::Work>(HostTensors& inputs, HostTensors& outputs)>;

struct Plan {
  std::string name;
  c10d::OpType type = c10d::OpType::UNKNOWN;
  std::vector<at::Tensor> inputs;
  std::vector<at::Tensor> outputs; // a tensor in both is worked on in place
  int64_t bytes = 0; // over the busiest wire
  int64_t rounds = 1;
  int sends_to = -1;
  int receives_from = -1; // kAnySource: whoever comes
  int tag = 0;
  bool blocks_host = false;
  Start start;
};

constexpr int kAnySource = -2;

class TideBackend final : public c10d::Backend {
 public:
  using Work = c10d::Work;
  using WorkPtr = c10::intrusive_ptr<Work>;

  // `data` carries the tensors, `clock` the ready times; `ranks` are the group's in the world.
  TideBackend(
      c10::intrusive_ptr<c10d::Backend> data, c10::intrusive_ptr<c10d::Backend> clock,
      std::vector<int64_t> ranks);

  const std::string getBackendName() const override {
    return "tide";
  }

  WorkPtr broadcast(std::vector<at::Tensor>&, const c10d::BroadcastOptions&) override;
  WorkPtr allreduce(std::vector<at::Tensor>&, const c10d::AllreduceOptions&) override;
  WorkPtr allreduce_coalesced(std::vector<at::Tensor>&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPtr reduce(std::vector<at::Tensor>&, const c10d::ReduceOptions&) override;
  WorkPtr allgather(
      std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&,
      const c10d::AllgatherOptions&) override;
  WorkPtr _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPtr allgather_into_tensor_coalesced(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&, const c10d::AllgatherOptions&) override;
  WorkPtr gather(
      std::vector<std::vector<at::Tensor>>&, std::vector<at::Tensor>&,
      const c10d::GatherOptions&) override;
  WorkPtr scatter(
      std::vector<at::Tensor>&, std::vector<std::vector<at::Tensor>>&,
      const c10d::ScatterOptions&) override;
  WorkPtr reduce_scatter(
      std::vector<at::Tensor>&, std::vector<std::vector<at::Tensor>>&,
      const c10d::ReduceScatterOptions&) override;
  WorkPtr _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  WorkPtr reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&, const c10d::ReduceScatterOptions&) override;
  WorkPtr alltoall_base(
      at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override;
  WorkPtr alltoall(
      std::vector<at::Tensor>&, std::vector<at::Tensor>&, const c10d::AllToAllOptions&) override;
  WorkPtr send(std::vector<at::Tensor>&, int to, int tag) override;
  WorkPtr recv(std::vector<at::Tensor>&, int from, int tag) override;
  WorkPtr recvAnysource(std::vector<at::Tensor>&, int tag) override;
  WorkPtr barrier(const c10d::BarrierOptions&) override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override {
    return sequence_;
  }
  c10d::ErrorType getError() override {
    return c10d::ErrorType::SUCCESS;
  }
  bool supportsTimeEstimation() const override {
    return false;
  }

 private:
  WorkPtr issue(Plan plan);
  Lane& lane(c10::DeviceIndex device, const Plan& plan);
  void finish_overlapping(const Plan& plan);
  int64_t share(int64_t bytes) const; // what a ring moves of it
  Traffic traffic(const Plan& plan) const;

  c10::intrusive_ptr<c10d::Backend> data_;
  c10::intrusive_ptr<c10d::Backend> clock_;
  std::vector<int64_t> ranks_;
  std::mutex lanes_mutex_;
  std::map<std::pair<int, int>, std::unique_ptr<Lane>> lanes_; // by device and kind
  uint64_t sequence_ = 0;
};

} // namespace tide
