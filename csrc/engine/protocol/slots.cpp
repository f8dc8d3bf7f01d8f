#include "engine/protocol/slots.h"

#include <algorithm>
#include <utility>

namespace actckpt {

bool drop_passed(Backend* backend, Fences* fences) {
  fences->erase(
      std::remove_if(fences->begin(), fences->end(), [&](const EventPtr& fence) { return backend->passed(fence); }),
      fences->end());
  return fences->empty();
}

void Slots::settle() {
  while (!cooling_.empty() && drop_passed(backend_, &cooling_.front().fences)) {
    cooling_.pop_front();
  }
}

std::optional<Block> Slots::take(std::size_t bytes, Fences* fences) {
  if (!rules_.reused_slots_keep_fences) {
    unpassed_.clear();
  }
  std::optional<Block> slot = pool_->try_reuse(bytes);
  while (!slot.has_value() && !cooling_.empty()) {
    Cooling oldest = std::move(cooling_.front());
    cooling_.pop_front();
    unpassed_.insert(unpassed_.end(), oldest.fences.begin(), oldest.fences.end());
    oldest.slot = Block();
    slot = pool_->try_reuse(bytes);
  }
  if (!slot.has_value()) {
    slot = pool_->try_allocate(bytes);
  }
  drop_passed(backend_, &unpassed_);  // see NOTE [Unpassed fences]
  fences->insert(fences->end(), unpassed_.begin(), unpassed_.end());
  return slot;
}

void Slots::give(Block slot, Fences fences) { cooling_.push_back({std::move(slot), std::move(fences)}); }

}  // namespace actckpt
