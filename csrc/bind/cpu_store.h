// The store of CPU tensors, which the offload hooks call directly.
//
// Thread rule: GIL held; calls that wait release it. Ownership: tickets share the engine; they are used while the
// store's Python object is alive.

#pragma once

#include <cstdint>
#include <memory>
#include <utility>

#include "bind/device_handles.h"
#include "offload/store.h"

namespace actckpt::python {

class CpuStore final : public Store {
 public:
  explicit CpuStore(std::shared_ptr<DeviceHandle> engine) : engine_(std::move(engine)) {}

  std::unique_ptr<StoreTicket> put(const Source& source, bool must) override;
  std::shared_ptr<DeviceHandle> engine() const { return engine_; }

  // Logs new failed writes; what they have stays in bounce buffers.
  void check_writes();

 private:
  const std::shared_ptr<DeviceHandle> engine_;
  std::uint64_t num_told_ = 0;
};

}  // namespace actckpt::python
