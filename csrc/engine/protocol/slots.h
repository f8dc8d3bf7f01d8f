// Host slots in stream order: a pool whose blocks may still be in use by device copies.
//
// Contract: `give` takes a slot with the last events of its owner (protocol line 12); `take` returns a slot and every
// event that its copies must wait for (line 3). Slots whose events have passed are used first, then slots still in use,
// oldest first; only then does the pool grow. So a host that runs ahead of the device does not double the pool.
// NOTE [Unpassed fences]: a returned slot is cut anew, so a later owner may hold parts of several. Every owner
// therefore waits for all fences of reused slots that have not been seen to pass.
// Thread rule: the owner serialises. Ownership: owns slots given back.

#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "engine/memory/pool.h"
#include "engine/protocol/backend.h"
#include "engine/protocol/rules.h"

namespace actckpt {

using Fences = std::vector<EventPtr>;

// Forgets the events that the host sees have passed; true if none is left.
bool drop_passed(Backend* backend, Fences* fences);

class Slots {
 public:
  Slots(std::shared_ptr<Pool> pool, Backend* backend, const ProtocolRules& rules)
      : pool_(std::move(pool)), backend_(backend), rules_(rules) {}

  // Empty if the pool refuses. Throws DeviceError if a query fails. Passed slots are reused once `settle` has seen
  // them.
  std::optional<Block> take(std::size_t bytes, Fences* fences);
  void give(Block slot, Fences fences);

  // Returns passed slots to the pool.
  void settle();

 private:
  struct Cooling {
    Block slot;
    Fences fences;
  };

  const std::shared_ptr<Pool> pool_;
  Backend* const backend_;
  const ProtocolRules rules_;
  std::deque<Cooling> cooling_;
  Fences unpassed_;
};

}  // namespace actckpt
