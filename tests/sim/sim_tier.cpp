#include "sim/sim_tier.h"

#include <utility>

#include "engine/memory/extents.h"

namespace actckpt::sim {
struct SimTier::SimPlace : Place {
  SimPlace(SimTier* t, Span s) : tier(t), span(s) {}
  ~SimPlace() override {
    --tier->num_live_;
    tier->num_used_cells_ -= span.num_cells;
    tier->free_[span.num_cells].push_back(span);
  }
  SimTier* const tier;
  const Span span;
};

struct SimTier::SimHaul : Haul {
  SimHaul(World* w, int e, HaulError f) : world(w), event(e), failure(std::move(f)) {}
  bool ended() override { return world->passed(event); }
  const HaulError& error() const override { return failure; }
  World* const world;
  const int event;
  const HaulError failure;
};

SimTier::SimTier(World* world, std::vector<int> workers, const TierConfig& config)
    : world_(world), workers_(std::move(workers)), config_(config) {}

PlacePtr SimTier::reserve(std::size_t bytes) {
  const std::uint64_t cells = round_up(bytes, kCellBytes) / kCellBytes;
  if (num_used_cells_ + cells > config_.num_cells) {
    return nullptr;
  }
  ++num_live_;
  num_used_cells_ += cells;
  auto& stack = free_[cells];
  Span span{next_address_, cells};
  if (stack.empty()) {
    next_address_ += cells * kCellBytes;
  } else {
    span = stack.back();
    stack.pop_back();
  }
  return std::make_shared<SimPlace>(this, span);
}

HaulPtr SimTier::drain(const PlacePtr& place, std::byte* bounce) {
  const Span to = static_cast<const SimPlace&>(*place).span;
  const int worker = pick_worker();
  world_->copy(worker, to, {reinterpret_cast<std::uintptr_t>(bounce), to.num_cells}, "drain");
  HaulError failure;
  if (world_->chance(config_.drain_failures)) {
    world_->poison(worker, to);
    failure = {HaulError::kFull, "sim: no space."};
  }
  return std::make_shared<SimHaul>(world_, world_->record(worker), failure);
}

HaulPtr SimTier::fill(const PlacePtr& place, std::byte* bounce, bool) {
  const Span from = static_cast<const SimPlace&>(*place).span;
  const Span to{reinterpret_cast<std::uintptr_t>(bounce), from.num_cells};
  const int worker = pick_worker();
  world_->copy(worker, to, from, "fill");
  HaulError failure;
  if (world_->chance(config_.fill_failures)) {
    world_->poison(worker, to);
    failure = {HaulError::kFailed, "sim: other bytes."};
  }
  return std::make_shared<SimHaul>(world_, world_->record(worker), failure);
}

}  // namespace actckpt::sim
