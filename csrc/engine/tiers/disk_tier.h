// The tier below pinned memory: the spill file.
//
// Contract: as Tier. A failed write leaves the error in its haul, and the bytes where they were.
// Thread rule: as Tier; copies run in the workers' threads. Ownership: places share the file.

#pragma once

#include <memory>

#include "engine/disk/spill_file.h"
#include "engine/protocol/tier.h"
#include "engine/tiers/workers.h"

namespace actckpt {

class DiskTier : public Tier {
 public:
  DiskTier(std::shared_ptr<SpillFile> file, std::shared_ptr<Workers> workers)
      : file_(std::move(file)), workers_(std::move(workers)) {}
  PlacePtr reserve(std::size_t bytes) override;
  HaulPtr drain(const PlacePtr& place, std::byte* bounce) override;
  HaulPtr fill(const PlacePtr& place, std::byte* bounce, bool urgent) override;

 private:
  const std::shared_ptr<SpillFile> file_;
  const std::shared_ptr<Workers> workers_;
};

}  // namespace actckpt
