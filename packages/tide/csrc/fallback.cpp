// Every operator without a kernel of its own: the CPU's kernel, on the device's bytes.
//
// Arguments become CPU tensors over the same memory. What the kernel returns is traced back: an
// argument is the argument, a view of one is a view of the device tensor, and a fresh
// result is given device memory and copied there. Fresh memory is thus counted exactly,
// and temporaries inside CPU kernels (which depend on this computer's core count) are not.
#include "alias.h"
#include "allocator.h"
#include "below.h"
#include "engine.h"
#include "generator.h"
#include "traits.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_map>

namespace tide {
namespace {

using c10::IValue;
using torch::jit::Stack;

// Kernels that draw from the CPU's default generator by themselves get the device's numbers in it
// for as long as they run.
class BorrowDefaultGenerator {
 public:
  explicit BorrowDefaultGenerator(at::Generator device) : device_(std::move(device)) {
    host_ = at::detail::getDefaultCPUGenerator();
    saved_ = host_.get_state();
    host_.set_state(device_.get_state());
  }
  ~BorrowDefaultGenerator() {
    device_.set_state(host_.get_state());
    host_.set_state(saved_);
  }

 private:
  at::Generator device_;
  at::Generator host_;
  at::Tensor saved_;
};

struct Call {
  const c10::OperatorHandle& op;
  const Traits& traits;
  AliasSet aliases;
  std::vector<at::Tensor> written;
  std::vector<Access> accesses;
  Work work;
  bool sized = true; // every `out` already has its size
  c10::DeviceIndex device = -1;
};

void note_device(Call& call, const at::Tensor& tensor) {
  if (is_tide(tensor)) {
    const auto device = tensor.device().index();
    TORCH_CHECK(
        call.device < 0 || call.device == device || tensor.dim() == 0,
        call.traits.name, ": expected all tensors to be on the same device, but found tide:",
        static_cast<int>(call.device), " and tide:", static_cast<int>(device));
    if (call.device < 0) {
      call.device = device;
    }
  } else if (tensor.defined()) {
    TORCH_CHECK(
        tensor.dim() == 0 || call.traits.mixes_devices,
        call.traits.name, ": expected all tensors to be on the same device, but found one of shape ",
        tensor.sizes(), " on ", tensor.device(), " among tensors on tide");
  }
}

IValue alias_argument(Call& call, const at::Tensor& tensor, size_t argument) {
  if (!is_tide(tensor)) {
    // Host values are read now: a queued kernel must not see them change.
    return Engine::get().asynchronous() && tensor.defined() ? tensor.clone() : tensor;
  }
  const bool write = call.traits.writes[argument];
  const bool out = call.traits.outs[argument];
  if (!call.traits.view) {
    if (!out) {
      add_accesses(tensor, false, call.accesses);
      call.work.bytes += bytes_of(tensor);
      if (call.work.dtype == at::kFloat || tensor.is_floating_point()) {
        call.work.dtype = tensor.scalar_type();
      }
    }
    if (write) {
      add_accesses(tensor, true, call.accesses);
      call.work.bytes += bytes_of(tensor);
      call.written.push_back(tensor);
      call.sized &= !out || tensor.numel() > 0;
    }
  }
  return call.aliases.of(tensor);
}

void find_devices(Call& call, const Stack& arguments) {
  for (const IValue& value : arguments) {
    if (value.isTensor()) {
      note_device(call, value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& tensor : value.toTensorVector()) {
        note_device(call, tensor);
      }
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        if (tensor) {
          note_device(call, *tensor);
        }
      }
    } else if (value.isDevice() && value.toDevice().is_privateuseone() && call.device < 0) {
      const auto device = value.toDevice();
      call.device = device.has_index() ? device.index() : current_device();
    }
  }
  if (call.device < 0) {
    call.device = current_device();
  }
}

IValue on_host(Call& call, const IValue& value, size_t argument) {
  if (value.isTensor()) {
    return alias_argument(call, value.toTensor(), argument);
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) {
      list.push_back(alias_argument(call, tensor, argument).toTensor());
    }
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      list.push_back(
          tensor && tensor->defined()
              ? std::optional<at::Tensor>(alias_argument(call, *tensor, argument).toTensor())
              : tensor);
    }
    return list;
  }
  if (value.isDevice()) {
    return c10::Device(c10::DeviceType::CPU);
  }
  return value;
}

// Gives fresh results device memory, once for each storage they share.
class Adopter {
 public:
  explicit Adopter(Call& call) : call_(call) {}

  at::Tensor adopt(const at::Tensor& result) {
    if (!result.defined() || is_tide(result)) {
      return result;
    }
    if (at::Tensor argument = call_.aliases.original(result); argument.defined()) {
      return argument;
    }
    auto* storage = result.storage().unsafeGetStorageImpl();
    if (auto* original = call_.aliases.original_storage(storage)) {
      return over(c10::Storage(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(original)), result);
    }
    auto found = fresh_.find(storage);
    if (found == fresh_.end()) {
      found = fresh_.emplace(storage, give_memory(*storage)).first;
    }
    at::Tensor tensor = over(found->second, result);
    call_.written.push_back(tensor);
    call_.work.bytes += bytes_of(tensor);
    return tensor;
  }

  c10::Storage give_memory(const c10::StorageImpl& storage) {
    const size_t bytes = storage.nbytes();
    c10::DataPtr data = allocate_on(call_.device, bytes);
    if (bytes > 0) {
      // At its place in the stream: what was queued there before may still use the bytes.
      Engine& engine = Engine::get();
      engine.run(engine.current_stream(call_.device), [&] {
        std::memcpy(data.get(), storage.data(), bytes);
      });
    }
    return c10::Storage(
        c10::Storage::use_byte_size_t(), static_cast<int64_t>(bytes), std::move(data),
        device_allocator(), /*resizable=*/true);
  }

 private:
  static at::Tensor over(c10::Storage storage, const at::Tensor& like) {
    auto tensor = at::detail::make_tensor<c10::TensorImpl>(
        std::move(storage), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.dtype());
    tensor.unsafeGetTensorImpl()->set_storage_offset(like.storage_offset());
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides());
    return tensor;
  }

  Call& call_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> fresh_;
};

// A kernel that resized an `out` argument worked in host memory: follow it.
void follow_resizes(Call& call, Adopter& adopter, const Stack& arguments) {
  for (const IValue& value : arguments) {
    if (!value.isTensor() || !value.toTensor().defined()) {
      continue;
    }
    const at::Tensor& alias = value.toTensor();
    at::Tensor tensor = call.aliases.original(alias);
    if (!tensor.defined()) {
      continue;
    }
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (alias.storage().data() != storage->data()) {
      c10::Storage fresh = adopter.give_memory(*alias.storage().unsafeGetStorageImpl());
      storage->set_nbytes(fresh.nbytes());
      storage->set_data_ptr_noswap(fresh.unsafeGetStorageImpl()->set_data_ptr({}));
    }
    if (alias.sizes() != tensor.sizes() || alias.strides() != tensor.strides()) {
      tensor.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
      call.work.bytes += bytes_of(tensor);
    }
  }
}

void run_on_cpu(const c10::OperatorHandle& op, Stack& stack) {
  const BelowEverything below;
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
}

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  check_fork();
  Call call{op, traits_of(op)};
  const Traits& traits = call.traits;
  const size_t count = op.schema().arguments().size();
  Stack arguments(stack->end() - static_cast<int64_t>(count), stack->end());
  find_devices(call, arguments);
  const c10::DeviceGuard guard(c10::Device(c10::DeviceType::PrivateUse1, call.device));
  Engine& engine = Engine::get();
  StreamState& stream = engine.current_stream(call.device);

  Stack host;
  for (size_t i = 0; i < count; ++i) {
    host.push_back(on_host(call, arguments[i], i));
  }
  at::Generator generator;
  if (traits.generator >= 0 || traits.hidden_random) {
    generator = default_generator(call.device);
    if (traits.generator >= 0) {
      if (!arguments[traits.generator].isNone()) {
        generator = arguments[traits.generator].toGenerator();
      }
      TORCH_CHECK(
          generator.device().is_privateuseone(), traits.name, ": expected a generator of device ",
          "tide but found one of ", generator.device());
      host[traits.generator] = engine_of(generator);
    }
  }

  if (traits.view) {
    run_on_cpu(op, host);
    Adopter adopter(call);
    torch::jit::drop(*stack, count);
    for (const IValue& result : host) {
      if (result.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const at::Tensor& tensor : result.toTensorVector()) {
          list.push_back(adopter.adopt(tensor));
        }
        stack->push_back(list);
      } else {
        stack->push_back(result.isTensor() ? IValue(adopter.adopt(result.toTensor())) : result);
      }
    }
    return;
  }

  if (traits.flops) {
    call.work.flops = traits.flops(arguments);
  }
  const auto origin = origin_of(traits.name.c_str(), &stream);
  Turn turn(stream);
  Issue issue;
  {
    Lock lock(engine.mutex);
    issue = engine.begin(stream, call.accesses, origin);
  }

  const bool random = generator.defined();
  if (traits.only_writes && call.sized && !random && !traits.host_waits) {
    // The result is where the caller put it: nothing to wait for.
    {
      Lock lock(engine.mutex);
      engine.finish_kernel(issue, traits.name, call.work, false);
    }
    engine.submit(stream, [op, host]() mutable { run_on_cpu(op, host); });
    turn.release();
    torch::jit::drop(*stack, count);
    // Results of such operators are their written arguments, in order.
    size_t next = 0;
    for (const auto& result : op.schema().returns()) {
      for (size_t i = 0; i < count; ++i) {
        const auto* argument = op.schema().arguments()[i].alias_info();
        if (argument && *argument == *result.alias_info()) {
          stack->push_back(arguments[i]);
          ++next;
          break;
        }
      }
    }
    TORCH_INTERNAL_ASSERT(next == op.schema().returns().size());
    return;
  }

  Stack given = host;
  engine.run(stream, [&] {
    std::optional<BorrowDefaultGenerator> borrowed;
    if (traits.hidden_random) {
      borrowed.emplace(engine_of(generator));
    }
    run_on_cpu(op, host);
  });
  turn.release(); // allocation may call back into Python

  Adopter adopter(call);
  follow_resizes(call, adopter, given);
  torch::jit::drop(*stack, count);
  for (const IValue& result : host) {
    if (result.isTensor()) {
      stack->push_back(adopter.adopt(result.toTensor()));
    } else if (result.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& tensor : result.toTensorVector()) {
        list.push_back(adopter.adopt(tensor));
      }
      stack->push_back(list);
    } else {
      stack->push_back(result);
    }
  }
  std::vector<Access> results;
  for (const at::Tensor& tensor : call.written) {
    add_accesses(tensor, true, results);
  }
  Lock lock(engine.mutex);
  for (const Access& access : results) {
    engine.touch(issue, access);
  }
  engine.finish_kernel(issue, traits.name, call.work, traits.host_waits);
}

} // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Operators that torch would take apart on an unknown device, and that are one kernel on a real
// one. `_foreach_*` come by the dozen, so they are found by name.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  for (const char* name :
       {"convolution", "convolution_backward", "_grouped_mm", "_stack", "addr", "all.dims", "any.dims", "mish_backward",
        "native_channel_shuffle", "native_group_norm", "native_layer_norm", "silu_backward"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::_foreach_", 0) == 0 &&
        name.overload_name.find("out") == std::string::npos) {
      const auto short_name = name.name.substr(6) +
          (name.overload_name.empty() ? "" : "." + name.overload_name);
      m.impl(short_name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

} // namespace tide
