// What torch asks of a device: its guard, and the hooks of an accelerator.
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace sim {
namespace {

/// torch.Event; each recording replaces the one before.
struct Event {
  MomentPtr moment;
  int device = 0;
};

int index_of(c10::Device device) { return device.index() < 0 ? current_device() : device.index(); }

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}

  static c10::Stream stream_of(int device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kType, c10::DeviceIndex(device)), id);
  }
  static Event& event_of(void* event) { return *static_cast<Event*>(event); }

  c10::DeviceType type() const override { return kType; }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(num_devices()); }
  c10::Device getDevice() const override { return {kType, c10::DeviceIndex(current_device())}; }
  void setDevice(c10::Device device) const override {
    if (device.index() >= 0) set_device(device.index());
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < num_devices()) set_device(device.index());
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    setDevice(device);
    return before;
  }

  c10::Stream getStream(c10::Device device) const override {
    return stream_of(index_of(device), current_stream(index_of(device)));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_of(index_of(device), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool is_high) const override {
    return getNewStream(device, is_high ? -1 : 0);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return stream_of(index_of(device), take_stream(index_of(device), priority < 0));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = getStream(stream.device());
    set_stream(stream.device_index(), stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return is_idle(stream.device_index(), stream.id());
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    synchronize_stream(stream.device_index(), stream.id());
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    synchronize_device(device);
  }

  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
      const c10::EventFlag) const override {
    if (!*event) *event = new Event;
    event_of(*event) = {sim::record(stream.device_index(), stream.id()), stream.device_index()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event) make_wait(stream.device_index(), stream.id(), event_of(event).moment);
  }
  bool queryEvent(void* event) const override {
    forbid_in_captures();
    if (!event) return true;
    check(event_of(event).device);
    return event_of(event).moment->is_done();
  }
  void synchronizeEvent(void* event) const override {
    forbid_in_captures();
    if (!event) return;
    event_of(event).moment->wait();
    check(event_of(event).device);
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    TORCH_CHECK(begin && end, "Both events must be recorded before calculating elapsed time.");
    check(event_of(begin).device);
    auto from = event_of(begin).moment, to = event_of(end).moment;
    TORCH_CHECK(from->is_done() && to->is_done(),
        "Both events must be completed before calculating elapsed time.");
    return std::chrono::duration<double, std::milli>(to->at - from->at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    allocator().recordStream(data, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return num_devices() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return device_at(device).is_used;
  }
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(num_devices()); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(current_device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override {
    if (device != current_device()) note_use(device_at(device).number); // as cudaSetDevice, from 12
    set_device(device);
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = getCurrentDevice();
    if (device >= 0) set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  at::Device getDeviceFromPtr(void* data) const override {
    return {kType, c10::DeviceIndex(device_of(data))};
  }
  // Random numbers are those of the CPU.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override {
    return at::detail::createCPUGenerator();
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    c10::DataPtr made = allocator().allocate(bytes);
    if (size_t kept = std::min(storage.nbytes(), bytes))
      allocator().copy_data(made.get(), storage.data(), kept);
    storage.set_data_ptr_noswap(std::move(made));
    storage.set_nbytes(bytes);
  }
};
const bool is_registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();
} // namespace

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)
} // namespace sim
