// Torch's three allocators over the machine's memory: of device tensors, of pinned tensors, and of the CPU.
//
// Contract: past the capacity c10::OutOfMemoryError. While a DeviceWorkspace lives, what CPU kernels allocate in this
// thread is memory of the device, freed by `free_device_memory`; the allocator of the CPU is replaced for that when a
// device is first used. Thread rule: any thread. Ownership: the allocators live for good.

#pragma once

#include <c10/core/Allocator.h>

#include "sim/device/machine/streams.h"

namespace actckpt::sim_device {

void register_allocators();

c10::Allocator* device_allocator();
c10::Allocator* pinned_allocator();
void free_device_memory(void* data);
c10::DataPtr allocate_on(int device, std::size_t bytes);

class DeviceWorkspace {
 public:
  explicit DeviceWorkspace(int device);
  DeviceWorkspace(const DeviceWorkspace&) = delete;
  DeviceWorkspace& operator=(const DeviceWorkspace&) = delete;
  ~DeviceWorkspace();

 private:
  const int before_;
};

}  // namespace actckpt::sim_device
