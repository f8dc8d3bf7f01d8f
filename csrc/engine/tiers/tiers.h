// The two tiers below pinned memory: pageable host memory, and the spill file.
//
// Contract: as Tier. Pageable bytes lie in a pool without a registrar; a disk write that fails
// leaves the error in its haul, and the bytes where they were.
// Thread rule: as Tier; copies run in the workers' threads. Ownership: places share pool or file.

#pragma once

#include <memory>

#include "engine/disk/spill_file.h"
#include "engine/memory/pool.h"
#include "engine/protocol/tier.h"
#include "engine/tiers/workers.h"

namespace actckpt {

class PageableTier : public Tier {
 public:
  PageableTier(std::shared_ptr<Pool> pool, std::shared_ptr<Workers> workers)
      : pool_(std::move(pool)), workers_(std::move(workers)) {}
  PlacePtr reserve(std::size_t bytes) override;
  HaulPtr drain(const PlacePtr& place, std::byte* bounce) override;
  HaulPtr fill(const PlacePtr& place, std::byte* bounce, bool urgent) override;

 private:
  const std::shared_ptr<Pool> pool_;
  const std::shared_ptr<Workers> workers_;
};

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
