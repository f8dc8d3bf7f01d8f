// What tests may do to the driver library. The library itself is the functions of driver.cpp, with the names of CUDA's.

#pragma once

#include <cstdint>

#include "sim/device/machine/streams.h"

namespace actckpt::sim_device {

struct DriverControls {
  static constexpr std::uint64_t kNever = UINT64_MAX;

  std::uint64_t num_calls = 0;        // that can fail
  std::uint64_t fails_from = kNever;  // this call and all later ones return `failure`
  int failure = 0;
  bool refuses_pins = false;
};

DriverControls& driver_controls();

// What the driver calls the stream: null for the default one.
void* handle_of(const Stream* stream);
// The stream of a handle on a device; null: the driver knows none of that name.
Stream* stream_of(int device, const void* handle);

}  // namespace actckpt::sim_device
