#include "collective.h"

#include "alias.h"
#include "below.h"
#include "work.h"

#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

namespace tide {
namespace {

int64_t total(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const at::Tensor& tensor : tensors) {
    bytes += static_cast<int64_t>(tensor.nbytes());
  }
  return bytes;
}

std::vector<std::vector<at::Tensor>> one_list(const HostTensors& tensors) {
  return {tensors};
}

template <typename Options>
Options blocking(Options options) {
  options.asyncOp = true; // ours decides when to wait
  return options;
}

} // namespace

TideBackend::TideBackend(
    c10::intrusive_ptr<c10d::Backend> data, c10::intrusive_ptr<c10d::Backend> clock,
    std::vector<int64_t> ranks)
    : c10d::Backend(data->getRank(), data->getSize()),
      data_(std::move(data)),
      clock_(std::move(clock)),
      ranks_(std::move(ranks)) {
  TORCH_CHECK(ranks_.size() == static_cast<size_t>(getSize()), "a rank of the world for each of the group");
}

int64_t TideBackend::share(int64_t bytes) const {
  return bytes * (getSize() - 1) / getSize();
}

Traffic TideBackend::traffic(const Plan& plan) const {
  const int64_t devices = Engine::get().machine.devices_per_node;
  Traffic found{plan.bytes, 0, 1, plan.rounds};
  if (devices == 0) {
    return found;
  }
  const auto node = [&](int rank) { return ranks_[rank] / devices; };
  const int peer = std::max(plan.sends_to, plan.receives_from);
  if (peer >= 0) {
    if (node(peer) != node(getRank())) {
      std::swap(found.inside, found.outside);
    }
    return found;
  }
  std::map<int64_t, int64_t> members;
  for (int rank = 0; rank < getSize(); ++rank) {
    ++members[node(rank)];
  }
  if (members.size() == 1) {
    return found;
  }
  int64_t fewest = getSize();
  for (const auto& [where, count] : members) {
    fewest = std::min(fewest, count);
  }
  if (plan.type == c10d::OpType::ALLTOALL_BASE || plan.type == c10d::OpType::ALLTOALL) {
    const int64_t others = getSize() - 1; // `bytes` is what goes to all of them
    found.outside = plan.bytes * (getSize() - fewest) / others;
    found.inside = plan.bytes * (fewest - 1) / others;
    return found;
  }
  found.outside = plan.bytes;
  found.ports = fewest;
  return found;
}

Lane& TideBackend::lane(c10::DeviceIndex device, const Plan& plan) {
  // 0 for collectives, then a lane out and a lane in for each peer, one in for any.
  int kind = 0;
  if (plan.sends_to >= 0) {
    kind = 1 + 2 * plan.sends_to;
  } else if (plan.receives_from >= 0) {
    kind = 2 + 2 * plan.receives_from;
  } else if (plan.receives_from == kAnySource) {
    kind = -1;
  }
  std::lock_guard<std::mutex> lock(lanes_mutex_);
  auto& slot = lanes_[{device, kind}];
  if (!slot) {
    slot = std::make_unique<Lane>();
    slot->stream = &Engine::get().new_stream(device, 0);
  }
  return *slot;
}

void TideBackend::finish_overlapping(const Plan& plan) {
  // Inputs are read now: a result of this group that has not landed must land first.
  std::vector<c10::intrusive_ptr<TideWork>> earlier;
  {
    std::lock_guard<std::mutex> lanes_lock(lanes_mutex_);
    for (auto& [key, lane] : lanes_) {
      std::lock_guard<std::mutex> lock(lane->mutex);
      for (const auto& work : lane->unfinished) {
        for (const auto& tensors : {plan.inputs, plan.outputs}) {
          for (const at::Tensor& tensor : tensors) {
            if (work->writes_into(tensor)) {
              earlier.push_back(work);
            }
          }
        }
      }
    }
  }
  for (const auto& work : earlier) {
    work->finish();
  }
}

TideBackend::WorkPtr TideBackend::issue(Plan plan) {
  check_fork();
  const at::Tensor anchor = !plan.inputs.empty() ? plan.inputs.front()
      : !plan.outputs.empty() ? plan.outputs.front()
                              : at::Tensor();
  const auto device = anchor.defined() ? anchor.device().index() : current_device();
  const c10::DeviceGuard guard(c10::Device(c10::DeviceType::PrivateUse1, device));
  finish_overlapping(plan);
  ++sequence_;
  Lane& where = lane(device, plan);
  StreamState& stream = *where.stream;
  Engine& engine = Engine::get();
  std::vector<Access> accesses;
  for (const at::Tensor& tensor : plan.inputs) {
    add_accesses(tensor, false, accesses);
  }
  for (const at::Tensor& tensor : plan.outputs) {
    add_accesses(tensor, true, accesses);
  }
  const auto origin = origin_of(plan.name.c_str(), &stream);
  auto work = c10::make_intrusive<TideWork>(getRank(), std::move(plan), where);
  work->clock_backend = clock_;
  work->traffic = traffic(work->plan);
  {
    Lock lock(engine.mutex);
    StreamState& caller = engine.current_stream(device);
    engine.advance_host(engine.machine.launch);
    const Moment ready = engine.mark(caller);
    engine.wait(stream, ready);
    engine.begin(stream, accesses, origin);
    work->ready_here = ready.time;
    work->moment = engine.mark(stream);
  }
  Plan& what = work->plan;
  engine.run(stream, [&] {
    const BelowEverything below;
    AliasSet aliases;
    for (const at::Tensor& tensor : what.inputs) {
      work->host_inputs.push_back(aliases.of(tensor).clone(at::MemoryFormat::Contiguous));
    }
    for (const at::Tensor& tensor : what.outputs) {
      at::Tensor host;
      for (size_t i = 0; i < what.inputs.size(); ++i) {
        if (what.inputs[i].is_same(tensor)) {
          host = work->host_inputs[i];
        }
      }
      if (!host.defined()) {
        host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
      }
      work->host_outputs.push_back(host);
    }
  });

  work->ready = at::empty({1}, at::TensorOptions().dtype(at::kLong).device(at::kCPU));
  work->ready.fill_(work->ready_here);
  {
    std::lock_guard<std::mutex> lock(where.mutex);
    HostTensors time{work->ready};
    if (what.sends_to >= 0) {
      work->clock = clock_->send(time, what.sends_to, what.tag);
    } else if (what.receives_from >= 0) {
      work->clock = clock_->recv(time, what.receives_from, what.tag);
    } else if (what.receives_from != kAnySource) {
      c10d::AllreduceOptions latest;
      latest.reduceOp = c10d::ReduceOp::MAX;
      work->clock = clock_->allreduce(time, latest);
    }
    work->data = what.start(work->host_inputs, work->host_outputs);
    where.unfinished.push_back(work);
  }
  return work;
}

TideBackend::WorkPtr TideBackend::broadcast(
    std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) {
  Plan plan{"broadcast", c10d::OpType::BROADCAST, tensors, tensors, total(tensors)};
  plan.start = [this, options](HostTensors& in, HostTensors&) {
    return data_->broadcast(in, blocking(options));
  };
  return issue(std::move(plan));
}

TideBackend::WorkPtr TideBackend::allreduce(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) {
  Plan plan{
      "all_reduce", c10d::OpType::ALLREDUCE, tensors, tensors, 2 * share(total(tensors)),
      2 * (getSize() - 1)};
  const bool average = options.reduceOp == c10d::ReduceOp::AVG;
  plan.start = [this, options, average](HostTensors& in, HostTensors&) {
    auto sum = blocking(options);
    if (average) {
      // gloo has no average: the share of each rank is taken before the sum.
      for (at::Tensor& tensor : in) {
        tensor.div_(getSize());
      }
      sum.reduceOp = c10d::ReduceOp::SUM;
    }
    return data_->allreduce(in, sum);
  };
  return issue(std::move(plan));
}

TideBackend::WorkPtr TideBackend::allreduce_coalesced(
    std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& options) {
  WorkPtr last;
  for (const at::Tensor& tensor : tensors) {
    std::vector<at::Tensor> one{tensor};
    last = allreduce(one, options);
  }
  return last; // finishing the last finishes those before it
}

TideBackend::WorkPtr TideBackend::reduce(
    std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& options) {
  Plan plan{"reduce", c10d::OpType::REDUCE, tensors, tensors, total(tensors)};
  plan.start = [this, options](HostTensors& in, HostTensors&) {
    return data_->reduce(in, blocking(options));
  };
  return issue(std::move(plan));
}

TideBackend::WorkPtr TideBackend::allgather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  Plan plan{
      "all_gather", c10d::OpType::ALLGATHER, inputs, outputs.at(0), share(total(outputs.at(0))),
      getSize() - 1};
  plan.start = [this, options](HostTensors& in, HostTensors& out) {
    auto lists = one_list(out);
    return data_->allgather(lists, in, blocking(options));
  };
  return issue(std::move(plan));
}

TideBackend::WorkPtr TideBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  Plan plan{
      "all_gather_into_tensor", c10d::OpType::_ALLGATHER_BASE, {input}, {output},
      share(total({output})), getSize() - 1};
  plan.start = [this, options](HostTensors& in, HostTensors& out) {
    return data_->_allgather_base(out[0], in[0], blocking(options));
  };
  return issue(std::move(plan));
}

TideBackend::WorkPtr TideBackend::allgather_into_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllgatherOptions& options) {
  WorkPtr last;
  for (size_t i = 0; i < outputs.size(); ++i) {
    last = _allgather_base(outputs[i], inputs[i], options);
  }
  return last;
}

TideBackend::WorkPtr TideBackend::gather(
    std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::GatherOptions& options) {
  const bool root = getRank() == options.rootRank;
  Plan plan{
      "gather", c10d::OpType::GATHER, inputs, root ? outputs.at(0) : std::vector<at::Tensor>(),
      share(total(inputs) * getSize())};
  plan.start = [this, options, root](HostTensors& in, HostTensors& out) {
    auto lists = root ? one_list(out) : std::vector<std::vector<at::Tensor>>();
    return data_->gather(lists, in, blocking(options));
  };
  return issue(std::move(plan));
}

TideBackend::WorkPtr TideBackend::scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ScatterOptions& options) {
  const bool root = getRank() == options.rootRank;
  Plan plan{
      "scatter", c10d::OpType::SCATTER, root ? inputs.at(0) : std::vector<at::Tensor>(), outputs,
      share(total(outputs) * getSize())};
  plan.start = [this, options, root](HostTensors& in, HostTensors& out) {
    auto lists = root ? one_list(in) : std::vector<std::vector<at::Tensor>>();
    return data_->scatter(out, lists, blocking(options));
  };
  return issue(std::move(plan));
}

TideBackend::WorkPtr TideBackend::reduce_scatter(
    std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
    const c10d::ReduceScatterOptions& options) {
  // gloo has only the flat one.
  at::Tensor flat = at::cat([&] {
    std::vector<at::Tensor> rows;
    for (const at::Tensor& tensor : inputs.at(0)) {
      rows.push_back(tensor.reshape({-1}));
    }
    return rows;
  }());
  return _reduce_scatter_base(outputs.at(0), flat, options);
}

TideBackend::WorkPtr TideBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  Plan plan{
      "reduce_scatter_tensor", c10d::OpType::_REDUCE_SCATTER_BASE, {input}, {output},
      share(total({input})), getSize() - 1};
  const bool average = options.reduceOp == c10d::ReduceOp::AVG;
  plan.start = [this, options, average](HostTensors& in, HostTensors& out) {
    auto sum = blocking(options);
    if (average) {
      in[0].div_(getSize());
      sum.reduceOp = c10d::ReduceOp::SUM;
    }
    return data_->_reduce_scatter_base(out[0], in[0], sum);
  };
  return issue(std::move(plan));
}

TideBackend::WorkPtr TideBackend::reduce_scatter_tensor_coalesced(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::ReduceScatterOptions& options) {
  WorkPtr last;
  for (size_t i = 0; i < outputs.size(); ++i) {
    last = _reduce_scatter_base(outputs[i], inputs[i], options);
  }
  return last;
}

TideBackend::WorkPtr TideBackend::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
    std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& options) {
  Plan plan{
      "all_to_all_single", c10d::OpType::ALLTOALL_BASE, {input}, {output}, share(total({input})),
      getSize() - 1};
  plan.start = [this, options, output_splits, input_splits](HostTensors& in, HostTensors& out) mutable {
    return data_->alltoall_base(out[0], in[0], output_splits, input_splits, blocking(options));
  };
  return issue(std::move(plan));
}

TideBackend::WorkPtr TideBackend::alltoall(
    std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
    const c10d::AllToAllOptions& options) {
  Plan plan{
      "all_to_all", c10d::OpType::ALLTOALL, inputs, outputs, share(total(inputs)), getSize() - 1};
  // gloo has only the flat one: gather the rows, exchange, and hand the pieces out.
  plan.start = [this, options](HostTensors& in, HostTensors& out) {
    HostTensors rows;
    std::vector<int64_t> input_splits;
    std::vector<int64_t> output_splits;
    int64_t elements = 0;
    for (const at::Tensor& tensor : in) {
      rows.push_back(tensor.reshape({-1}));
      input_splits.push_back(tensor.numel());
    }
    for (const at::Tensor& tensor : out) {
      output_splits.push_back(tensor.numel());
      elements += tensor.numel();
    }
    at::Tensor flat_in = at::cat(rows);
    at::Tensor flat_out = at::empty({elements}, flat_in.options());
    auto work = data_->alltoall_base(flat_out, flat_in, output_splits, input_splits, blocking(options));
    int64_t start = 0;
    for (at::Tensor& tensor : out) {
      tensor = flat_out.narrow(0, start, tensor.numel()).view(tensor.sizes());
      start += tensor.numel();
    }
    return work;
  };
  return issue(std::move(plan));
}

TideBackend::WorkPtr TideBackend::send(std::vector<at::Tensor>& tensors, int to, int tag) {
  Plan plan{"send", c10d::OpType::SEND, tensors, {}, total(tensors)};
  plan.sends_to = to;
  plan.tag = tag;
  plan.start = [this, to, tag](HostTensors& in, HostTensors&) { return data_->send(in, to, tag); };
  return issue(std::move(plan));
}

TideBackend::WorkPtr TideBackend::recv(std::vector<at::Tensor>& tensors, int from, int tag) {
  Plan plan{"recv", c10d::OpType::RECV, {}, tensors, total(tensors)};
  plan.receives_from = from;
  plan.tag = tag;
  plan.start = [this, from, tag](HostTensors&, HostTensors& out) {
    return data_->recv(out, from, tag);
  };
  return issue(std::move(plan));
}

TideBackend::WorkPtr TideBackend::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  Plan plan{"recv", c10d::OpType::RECVANYSOURCE, {}, tensors, total(tensors)};
  plan.receives_from = kAnySource;
  plan.tag = tag;
  plan.start = [this, tag](HostTensors&, HostTensors& out) {
    return data_->recvAnysource(out, tag);
  };
  return issue(std::move(plan));
}

TideBackend::WorkPtr TideBackend::barrier(const c10d::BarrierOptions& options) {
  Plan plan{"barrier", c10d::OpType::BARRIER, {}, {}, 0};
  plan.blocks_host = true;
  plan.start = [this, options](HostTensors&, HostTensors&) {
    return data_->barrier(blocking(options));
  };
  return issue(std::move(plan));
}

} // namespace tide
