#include "observe.h"

#include "alias.h"
#include "engine.h"
#include "pinned.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>

#include <unordered_map>

namespace tide {
namespace {

// How an operator on CPU tensors uses its arguments.
struct HostUse {
  bool touches_data = false;
  bool may_be_a_link_copy = false;
  std::vector<bool> writes;
  std::vector<bool> outs;
};

HostUse find_use(const c10::OperatorName& name) {
  HostUse use;
  const auto op = c10::Dispatcher::singleton().findSchema(name);
  if (!op || name.name.rfind("aten::", 0) != 0) {
    return use;
  }
  for (const char* metadata :
       {"aten::set_", "aten::resize_", "aten::empty", "aten::new_", "aten::record_stream", "aten::is_",
        "aten::_copy_from"}) {
    if (name.name.rfind(metadata, 0) == 0) {
      return use;
    }
  }
  if (name.name.find("_like") != std::string::npos) {
    return use;
  }
  for (const auto& result : op->schema().returns()) {
    if (result.alias_info() && !result.alias_info()->isWrite()) {
      return use; // a view
    }
  }
  // Composites are seen again as what they are made of.
  use.may_be_a_link_copy = name.name == "aten::copy_";
  use.touches_data = use.may_be_a_link_copy || op->hasKernelForDispatchKey(c10::DispatchKey::CPU);
  for (const auto& argument : op->schema().arguments()) {
    const bool write = argument.alias_info() && argument.alias_info()->isWrite();
    use.writes.push_back(write);
    // copy_, fill_ and the like overwrite without looking.
    use.outs.push_back(
        write && (argument.is_out() || use.may_be_a_link_copy || name.name == "aten::fill_" ||
                  name.name == "aten::zero_"));
  }
  return use;
}

const HostUse& use_of(const c10::OperatorName& name) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<std::string, std::unique_ptr<HostUse>>();
  std::lock_guard<std::mutex> lock(mutex);
  auto& slot = (*known)[name.name + "." + name.overload_name];
  if (!slot) {
    slot = std::make_unique<HostUse>(find_use(name));
  }
  return *slot;
}

bool is_pinned_tensor(const c10::IValue& value) {
  if (!value.isTensor()) {
    return false;
  }
  const at::Tensor& tensor = value.toTensor();
  return tensor.defined() && tensor.device().is_cpu() && tensor.layout() == at::kStrided &&
      tensor.has_storage() && is_pinned(tensor.storage().data());
}

std::unique_ptr<at::ObserverContext> on_operator(const at::RecordFunction& function) {
  const auto inputs = function.inputs();
  bool any = false;
  for (const auto& value : inputs) {
    any = any || is_pinned_tensor(value);
  }
  if (!any || in_forked_child()) {
    return nullptr;
  }
  const auto name = function.operator_name();
  if (!name) {
    return nullptr;
  }
  const HostUse& use = use_of(*name);
  if (!use.touches_data) {
    return nullptr;
  }
  if (use.may_be_a_link_copy) {
    for (const auto& value : inputs) {
      if (value.isTensor() && is_tide(value.toTensor())) {
        return nullptr; // the copy reports itself, as its stream's doing
      }
    }
  }
  std::vector<Access> accesses;
  bool writes = false;
  for (size_t i = 0; i < inputs.size() && i < use.writes.size(); ++i) {
    if (!is_pinned_tensor(inputs[i])) {
      continue;
    }
    if (!use.outs[i]) {
      add_accesses(inputs[i].toTensor(), false, accesses);
    }
    if (use.writes[i]) {
      add_accesses(inputs[i].toTensor(), true, accesses);
      writes = true;
    }
  }
  const auto origin = origin_of(
      ((writes ? "host write by " : "host read by ") + name->name).c_str(), nullptr);
  Engine& engine = Engine::get();
  Lock lock(engine.mutex);
  for (const Access& access : accesses) {
    engine.host_touch(access, origin);
  }
  return nullptr;
}

} // namespace

void observe_host(bool on) {
  static const at::CallbackHandle handle = at::addGlobalCallback(
      at::RecordFunctionCallback(&on_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
  if (on) {
    at::reenableCallback(handle);
  } else {
    at::disableCallback(handle);
  }
}

} // namespace tide
