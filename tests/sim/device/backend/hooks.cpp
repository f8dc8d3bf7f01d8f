// What torch asks of an accelerator besides guards: generators, pinned memory, sizes of storages.

#include <ATen/detail/PrivateUse1HooksInterface.h>

#include <algorithm>
#include <cstring>

#include "sim/device/backend/allocators.h"
#include "sim/device/backend/devices.h"
#include "sim/device/backend/generator.h"
#include "sim/device/backend/kernels.h"
#include "sim/device/machine/memory.h"
#include "sim/device/machine/pinned.h"

namespace actckpt::sim_device {
namespace {

class Hooks final : public at::PrivateUse1HooksInterface {
 public:
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(index_of(device)); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current_device()); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const c10::DeviceIndex before = getCurrentDevice();
    setCurrentDevice(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }

  at::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  bool isPinnedPtr(const void* data) const override {
    const Lock lock = lock_machine();
    return pinned_memory().contains(range_of(data, 1));
  }
  at::Device getDeviceFromPtr(void* data) const override {
    const Lock lock = lock_machine();
    const int device = device_memory().device_of(data);
    TORCH_CHECK(device >= 0, "not an address of sim memory");
    return torch_device(device);
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(index_of(device));
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override { return new_generator(index_of(device)); }

  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    c10::StorageImpl* const own = storage.unsafeGetStorageImpl();
    Stream* const stream = current_stream(own->device().index());
    c10::DataPtr resized = allocate_on(own->device().index(), bytes);
    const std::size_t kept = std::min(bytes, own->nbytes());
    {
      const KernelScope kernel(stream);
      note_kernel(stream, "resize", {range_of(own->data(), kept)}, {range_of(resized.get(), kept)});
      if (kept > 0) {
        std::memcpy(resized.get(), own->data(), kept);
      }
    }
    own->set_data_ptr_noswap(std::move(resized));
    own->set_nbytes(bytes);
  }
};

const bool is_registered = [] {
  register_allocators();
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

}  // namespace
}  // namespace actckpt::sim_device
