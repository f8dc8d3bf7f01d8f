// Copies between device memory and pinned memory, given to a stream and run late.
//
// Contract: a fault is recorded, and the copy goes on as far as it can, if the device side is not inside of one live
// block or the host side not inside of one pinned range; such a copy of pageable memory runs at once.
// Thread rule: under the machine's lock. Ownership: none of the memory.

#pragma once

#include "sim/device/machine/streams.h"

namespace actckpt::sim_device {

struct Copy {
  Direction direction;
  void* dst;
  const void* src;
  std::size_t bytes;
  const char* what;
};

void give_copy(Lock& lock, Stream* stream, const Copy& copy);

}  // namespace actckpt::sim_device
