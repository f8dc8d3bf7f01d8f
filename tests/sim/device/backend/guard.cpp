// Devices, streams and events for torch's own code: device guards, autograd's device threads, torch.accelerator.

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "sim/device/backend/devices.h"
#include "sim/device/machine/driver.h"
#include "sim/device/machine/memory.h"

namespace actckpt::sim_device {
namespace {

struct TorchEvent {
  bool is_timed;
  Point point;
};

TorchEvent* event_of(void* event) { return static_cast<TorchEvent*>(event); }

// The machine's lock, at a call of the program.
Lock enter() {
  Lock lock = lock_machine();
  streams().meddle(lock);
  return lock;
}

void synchronize_all(Lock& lock, int device) {
  for (const std::int64_t id : streams().ids(device)) {
    streams().synchronize(lock, streams().record(lock, streams().find(device, id)));
  }
}

}  // namespace

// Methods without `override` are missing in the older versions of torch.
class Guard final : public c10::impl::DeviceGuardImplInterface {
 public:
  static constexpr c10::DeviceType static_type = c10::kPrivateUse1;

  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return static_type; }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return torch_device(current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(index_of(device.index())); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) {
      set_current_device(device.index());
    }
  }

  c10::Stream getStream(c10::Device device) const override {
    return to_torch(current_stream(index_of(device.index())));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    const Lock lock = lock_machine();
    return to_torch(streams().find(index_of(device.index()), 0));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const Lock lock = lock_machine();
    return to_torch(streams().pooled(index_of(device.index())));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    Stream* next = nullptr;
    {
      const Lock lock = lock_machine();
      next = of_torch(lock, stream);
    }
    set_current_stream(next);
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const {
    const Lock lock = lock_machine();
    return handle_of(of_torch(lock, stream));
  }
  bool isStreamCapturing(const c10::Stream& stream) const {
    const Lock lock = lock_machine();
    return of_torch(lock, stream)->is_capturing;
  }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock = enter();
    return streams().query(lock, streams().record(lock, of_torch(lock, stream)));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Lock lock = enter();
    streams().synchronize(lock, streams().record(lock, of_torch(lock, stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const {
    Lock lock = enter();
    synchronize_all(lock, index_of(device));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) {
      *event = new TorchEvent{flag == c10::EventFlag::BACKEND_DEFAULT, {}};
    }
    const Lock lock = enter();
    event_of(*event)->point = streams().record(lock, of_torch(lock, stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      const Lock lock = enter();
      streams().wait(lock, of_torch(lock, stream), event_of(event)->point);
    }
  }
  bool queryEvent(void* event) const override {
    Lock lock = enter();
    return event == nullptr || streams().query(lock, Point(event_of(event)->point));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) {
      Lock lock = enter();
      streams().synchronize(lock, Point(event_of(event)->point));
    }
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete event_of(event); }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr && event_of(first)->is_timed && event_of(second)->is_timed,
                "sim: the time between events that have none: make them with enable_timing=True, and record them");
    const Lock lock = enter();
    return (event_of(second)->point.time_s - event_of(first)->point.time_s) * 1e3;
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    const Lock lock = lock_machine();
    device_memory().record_stream(lock, data.get(), of_torch(lock, stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

}  // namespace actckpt::sim_device
