// Devices and streams of the machine by torch's names.

#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#include "sim/device/machine/streams.h"

namespace actckpt::sim_device {

inline c10::Device torch_device(int device) { return {c10::kPrivateUse1, static_cast<c10::DeviceIndex>(device)}; }

// -1 is the current one.
inline int index_of(c10::DeviceIndex index) {
  TORCH_CHECK(index >= -1 && index < kNumDevices, "sim has devices 0 to ", kNumDevices - 1, ", not ",
              static_cast<int>(index));
  return index < 0 ? current_device() : index;
}

inline c10::Stream to_torch(const Stream* stream) {
  return c10::Stream(c10::Stream::UNSAFE, torch_device(stream->device), stream->id);
}

inline Stream* of_torch(const Lock&, const c10::Stream& stream) {
  Stream* const found = streams().find(stream.device_index(), stream.id());
  TORCH_CHECK(found != nullptr, "sim:", static_cast<int>(stream.device_index()), " has no stream ", stream.id());
  return found;
}

}  // namespace actckpt::sim_device
