#include "sim/device/machine/copies.h"

#include <string>

#include "sim/device/machine/checker.h"
#include "sim/device/machine/memory.h"
#include "sim/device/machine/pinned.h"

namespace actckpt::sim_device {

void give_copy(Lock& lock, Stream* stream, const Copy& copy) {
  if (copy.bytes == 0) {
    return;
  }
  const bool is_out = copy.direction == Direction::kToHost;
  const Range source = range_of(copy.src, copy.bytes);
  const Range target = range_of(copy.dst, copy.bytes);
  const Access access = streams().begin(lock, stream, copy.what);
  streams().take_link(lock, stream, copy.direction, copy.bytes);
  if (device_memory().find(is_out ? source : target) == nullptr) {
    faults().add(described(access) + (is_out ? " reads " : " writes ") + std::to_string(copy.bytes) +
                 " bytes of unallocated device memory");
    return;
  }
  checker().read(source, access, stream->clock);
  checker().write(target, access, stream->clock);
  const Range& host = is_out ? target : source;
  if (!pinned_memory().contains(host)) {
    faults().add(described(access) + " is a copy of pageable memory, or across two pinned ranges");
    streams().force(lock, stream, stream->issued);
  } else {
    pinned_memory().begin_use(host, access, is_out);
  }
  Task task{Task::Kind::kCopy};
  task.dst = static_cast<std::byte*>(copy.dst);
  task.src = static_cast<const std::byte*>(copy.src);
  task.bytes = copy.bytes;
  streams().issue(lock, stream, task);
  if (!pinned_memory().contains(host)) {
    streams().force(lock, stream, stream->issued);
  }
}

}  // namespace actckpt::sim_device
