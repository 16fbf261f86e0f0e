// What torch.Stream, torch.Event and torch.accelerator reach: devices, streams and events.
#include "engine.h"

#include "allocator.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <optional>

namespace tide {
namespace {

struct EventState {
  c10::DeviceIndex device = 0;
  bool timing = false;
  std::optional<Moment> moment; // where it was last recorded
};

c10::Stream as_stream(const StreamState& state) {
  return c10::Stream(
      c10::Stream::UNSAFE, c10::Device(c10::DeviceType::PrivateUse1, state.device), state.id);
}

StreamState& state_of(const c10::Stream& stream) {
  return Engine::get().stream(stream.device_index(), stream.id());
}

struct TideGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType kType = c10::DeviceType::PrivateUse1;

  c10::DeviceType type() const override {
    return kType;
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device old = getDevice();
    setDevice(device);
    return old;
  }
  c10::Device getDevice() const override {
    return c10::Device(kType, current_device());
  }
  void setDevice(c10::Device device) const override {
    if (device.has_index()) {
      set_current_device(device.index());
    }
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index() && device.index() < device_count()) {
      set_current_device(device.index());
    }
  }
  c10::DeviceIndex deviceCount() const noexcept override {
    return static_cast<c10::DeviceIndex>(device_count());
  }

  c10::Stream getStream(c10::Device device) const override {
    return as_stream(Engine::get().current_stream(index(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return as_stream(Engine::get().stream(index(device), 0));
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    check_fork();
    return as_stream(Engine::get().new_stream(index(device), priority));
  }
  // CUDA hands out 32 streams in turn, and two users may share one without knowing. Here
  // every stream is a new one: a shared stream would order what the program did not.
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high) const override {
    return getNewStream(device, high ? -1 : 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto device = stream.device_index();
    const StreamState& state = state_of(stream);
    const auto old = exchange_current_stream(device, state.id);
    return c10::Stream(c10::Stream::UNSAFE, stream.device(), old);
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return &state_of(stream);
  }
  bool queryStream(const c10::Stream& stream) const override {
    StreamState& state = state_of(stream);
    Engine& engine = Engine::get();
    Lock lock(engine.mutex);
    return query(engine.mark(state));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    check_fork();
    StreamState& state = state_of(stream);
    Engine& engine = Engine::get();
    Moment moment;
    {
      Lock lock(engine.mutex);
      moment = engine.mark(state);
    }
    engine.wait_host(moment);
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    Engine::get().synchronize(device);
  }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex device,
      const c10::EventFlag flag) const override {
    check_fork();
    StreamState& state = state_of(stream);
    if (!*event) {
      auto* made = new EventState();
      made->device = device < 0 ? stream.device_index() : device;
      made->timing = flag == c10::EventFlag::BACKEND_DEFAULT;
      *event = made;
    }
    auto* e = static_cast<EventState*>(*event);
    Engine& engine = Engine::get();
    Lock lock(engine.mutex);
    e->moment = engine.mark(state);
  }
  void block(void* event, const c10::Stream& stream) const override {
    auto* e = static_cast<EventState*>(event);
    if (!e) {
      return;
    }
    StreamState& state = state_of(stream);
    Engine& engine = Engine::get();
    Lock lock(engine.mutex);
    if (e->moment) {
      engine.wait(state, *e->moment);
    }
  }
  bool queryEvent(void* event) const override {
    auto* e = static_cast<EventState*>(event);
    Engine& engine = Engine::get();
    Lock lock(engine.mutex);
    return !e || !e->moment || query(*e->moment);
  }
  void synchronizeEvent(void* event) const override {
    check_fork();
    auto* e = static_cast<EventState*>(event);
    std::optional<Moment> moment;
    {
      Lock lock(Engine::get().mutex);
      moment = e ? e->moment : std::nullopt;
    }
    if (moment) {
      Engine::get().wait_host(*moment);
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<EventState*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto* a = static_cast<EventState*>(first);
    auto* b = static_cast<EventState*>(second);
    Lock lock(Engine::get().mutex);
    TORCH_CHECK(
        a && b && a->moment && b->moment, "tide: both events must be recorded before measuring");
    TORCH_CHECK(
        a->timing && b->timing, "tide: both events must be made with enable_timing=True");
    return static_cast<double>(b->moment->time - a->moment->time) / 1e6;
  }

  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator()->recordStream(pointer, stream);
  }

  c10::DeviceCapability getDeviceCapability(c10::Device) const override {
    return {}; // every dtype the CPU has
  }

 private:
  static c10::DeviceIndex index(c10::Device device) {
    return device.has_index() ? device.index() : current_device();
  }

  // Asking takes host time; otherwise a program that polls would wait for ever in virtual time.
  static bool query(const Moment& moment) {
    Engine& engine = Engine::get();
    const bool over = engine.passed(moment);
    if (over) {
      engine.host_sees(moment);
    } else {
      engine.advance_host(std::max<Nanoseconds>(engine.machine.launch / 5, 1));
    }
    return over;
  }
};

} // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, TideGuard);

} // namespace tide
