#include "generator.h"

#include "engine.h"

#include <ATen/CPUGeneratorImpl.h>

namespace tide {
namespace {

struct TideGenerator final : c10::GeneratorImpl {
  explicit TideGenerator(c10::DeviceIndex device, uint64_t seed = c10::default_rng_seed_val)
      : c10::GeneratorImpl(
            c10::Device(c10::DeviceType::PrivateUse1, device),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        inner(at::detail::createCPUGenerator(seed)) {}

  static c10::DeviceType device_type() {
    return c10::DeviceType::PrivateUse1;
  }
  void set_current_seed(uint64_t seed) override {
    inner.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    inner.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return inner.get_offset();
  }
  uint64_t current_seed() const override {
    return inner.current_seed();
  }
  uint64_t seed() override {
    return inner.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }

  at::Generator inner;

 private:
  TideGenerator* clone_impl() const override {
    auto* copy = new TideGenerator(device().index());
    copy->inner = inner.clone();
    return copy;
  }
};

} // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<TideGenerator>(device < 0 ? current_device() : device);
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* generators = [] {
    auto* all = new std::vector<at::Generator>();
    for (int i = 0; i < device_count(); ++i) {
      all->push_back(new_generator(static_cast<c10::DeviceIndex>(i)));
    }
    return all;
  }();
  return generators->at(device < 0 ? current_device() : device);
}

at::Generator engine_of(const at::Generator& generator) {
  return static_cast<TideGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
}

} // namespace tide
