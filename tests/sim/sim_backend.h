// The event protocol's backend over a simulated machine, straight to its queues.
//
// Contract: as Backend; a stream's handle is its queue's number plus one, 0 is the device's default
// stream. Device calls outside the right `enter` throw. Thread rule: one thread. Ownership: borrows
// the world.

#pragma once

#include <map>
#include <utility>
#include <vector>

#include "engine/protocol/backend.h"
#include "sim/world.h"

namespace actckpt::sim {

class SimBackend : public Backend {
 public:
  // default_queues[d] is device d's default stream.
  SimBackend(World* world, std::vector<int> default_queues);

  void enter(int device) override;
  void leave(int device) noexcept override;
  Stream side(int device, Side side) override;
  bool capturing(Stream stream) override;
  EventPtr record(Stream stream) override;
  void wait(Stream stream, const EventPtr& event) override;
  bool passed(const EventPtr& event) override;
  void copy_out(Stream stream, const Segment& host, std::uintptr_t src) override;
  void copy_in(Stream stream, std::uintptr_t dst, const Segment& host) override;

 private:
  int queue_of(Stream stream) const;

  World* const world_;
  const std::vector<int> default_queues_;
  std::vector<int> entered_;
  std::map<std::pair<int, Side>, Stream> sides_;
};

}  // namespace actckpt::sim
