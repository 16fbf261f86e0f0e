#include "traits.h"

#include <ATen/core/enum_tag.h>

#include <memory>
#include <mutex>
#include <unordered_map>

namespace tide {

const Traits& traits_of(const c10::OperatorHandle& op) {
  static std::mutex mutex;
  static auto* known = new std::unordered_map<const c10::FunctionSchema*, std::unique_ptr<Traits>>();
  const auto& schema = op.schema();
  std::lock_guard<std::mutex> lock(mutex);
  auto& slot = (*known)[&schema];
  if (slot) {
    return *slot;
  }
  auto traits = std::make_unique<Traits>();
  traits->name = schema.name();
  traits->flops = flop_count_for(traits->name);
  bool any_write = false;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const auto& argument = schema.arguments()[i];
    const bool write = argument.alias_info() && argument.alias_info()->isWrite();
    traits->writes.push_back(write);
    traits->outs.push_back(write && argument.is_out());
    any_write |= write;
    if (argument.type()->str().find("Generator") != std::string::npos) {
      traits->generator = static_cast<int>(i);
    }
  }
  traits->only_writes = any_write;
  for (const auto& result : schema.returns()) {
    const bool alias = result.alias_info() != nullptr;
    const bool write = alias && result.alias_info()->isWrite();
    traits->view |= alias && !write;
    traits->only_writes &= write;
    const auto kind = result.type()->kind();
    traits->host_waits |= kind == c10::TypeKind::NumberType || kind == c10::TypeKind::BoolType ||
        kind == c10::TypeKind::IntType || kind == c10::TypeKind::FloatType;
  }
  const bool seeded = op.hasTag(at::Tag::nondeterministic_seeded);
  traits->hidden_random = seeded && traits->generator < 0;
  traits->host_waits |=
      op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape);
  traits->mixes_devices = traits->name.find("index") != std::string::npos ||
      traits->name.find("_foreach_") != std::string::npos;
  slot = std::move(traits);
  return *slot;
}

} // namespace tide
