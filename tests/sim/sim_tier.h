// A tier whose workers are queues of the simulated machine.
//
// Contract: as Tier, and as hostile as it may be: a copy may run at any time after it was begun, on
// any worker, fail without a reason, and freed space is handed out again at once. A failed fill
// leaves garbage in the buffer.
// Thread rule: one thread. Ownership: borrows the world; must outlive its places.

#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "engine/protocol/tier.h"
#include "sim/world.h"

namespace actckpt::sim {

struct TierConfig {
  std::uint64_t num_cells = 0;
  double drain_failures = 0.0;  // chance of each
  double fill_failures = 0.0;
};

class SimTier : public Tier {
 public:
  SimTier(World* world, std::vector<int> workers, const TierConfig& config);

  PlacePtr reserve(std::size_t bytes) override;
  HaulPtr drain(const PlacePtr& place, std::byte* bounce) override;
  HaulPtr fill(const PlacePtr& place, std::byte* bounce, bool urgent) override;

  std::uint64_t num_live() const { return num_live_; }

 private:
  struct SimPlace;
  struct SimHaul;
  int pick_worker() { return workers_[world_->below(workers_.size())]; }

  World* const world_;
  const std::vector<int> workers_;
  const TierConfig config_;
  std::map<std::uint64_t, std::vector<Span>> free_;      // by cells: a stack
  std::uint64_t next_address_ = std::uint64_t{1} << 61;  // far from all memory
  std::uint64_t num_used_cells_ = 0;
  std::uint64_t num_live_ = 0;
};

}  // namespace actckpt::sim
