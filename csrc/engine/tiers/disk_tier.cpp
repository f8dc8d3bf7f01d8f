#include "engine/tiers/disk_tier.h"

#include <atomic>
#include <optional>
#include <utility>

#include "engine/errors.h"

namespace actckpt {
namespace {

class WorkerHaul : public Haul {
 public:
  // Starts `copy` in a worker.
  template <typename Copy>
  static HaulPtr begin(Workers* workers, bool urgent, Copy copy) {
    auto haul = std::make_shared<WorkerHaul>();
    workers->submit(
        [haul, copy = std::move(copy)] {
          try {
            copy();
          } catch (const OffloadFullError& error) {
            haul->error_ = {HaulError::kFull, error.what()};
          } catch (const std::exception& error) {
            haul->error_ = {HaulError::kFailed, error.what()};
          }
          haul->has_ended_.store(true, std::memory_order_release);
        },
        urgent);
    return haul;
  }
  bool ended() override { return has_ended_.load(std::memory_order_acquire); }
  const HaulError& error() const override { return error_; }

 private:
  std::atomic<bool> has_ended_{false};
  HaulError error_;  // written before has_ended_
};

struct SpilledPlace : Place {
  SpilledPlace(std::shared_ptr<SpillFile> f, SpillBlock b) : file(std::move(f)), block(std::move(b)) {}
  const std::shared_ptr<SpillFile> file;
  SpillBlock block;
};

}  // namespace

PlacePtr DiskTier::reserve(std::size_t bytes) {
  std::optional<SpillBlock> block = file_->try_reserve(bytes);
  return block.has_value() ? std::make_shared<SpilledPlace>(file_, std::move(*block)) : nullptr;
}

HaulPtr DiskTier::drain(const PlacePtr& place, std::byte* bounce) {
  auto own = std::static_pointer_cast<SpilledPlace>(place);
  return WorkerHaul::begin(workers_.get(), false,
                           [own = std::move(own), bounce] { own->file->write(&own->block, bounce); });
}

HaulPtr DiskTier::fill(const PlacePtr& place, std::byte* bounce, bool urgent) {
  auto own = std::static_pointer_cast<SpilledPlace>(place);
  return WorkerHaul::begin(workers_.get(), urgent,
                           [own = std::move(own), bounce] { own->file->read(own->block, bounce); });
}

}  // namespace actckpt
