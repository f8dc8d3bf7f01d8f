#include "engine/protocol/ring.h"

#include <algorithm>
#include <utility>

#include "engine/errors.h"

namespace actckpt {

Ring::~Ring() noexcept {
  if (fork_guard_.forked() && slab_.has_value()) {
    new Slab(std::move(*slab_));  // not mapped here: see NOTE [Fork]
  }
}

void Ring::open() {
  if (slab_.has_value() || num_buffers_ == 0) {
    return;
  }
  try {
    slab_.emplace(num_buffers_ * buffer_bytes_, registrar_);
  } catch (const OffloadFullError&) {  // a tensor that cannot pass stays where it is
    num_buffers_ = 0;
    return;
  }
  for (std::size_t i = 0; i < num_buffers_; ++i) {
    free_.push_back({slab_->data() + i * buffer_bytes_, {}});
  }
}

std::size_t Ring::num_free() {
  open();
  return free_.size();
}

std::size_t Ring::num_buffers() {
  open();
  return num_buffers_;
}

std::byte* Ring::take(Backend* backend, Fences* fences) {
  if (num_free() == 0) {
    return nullptr;
  }
  if (std::byte* const passed = take_passed(backend)) {
    return passed;
  }
  const Free oldest = std::move(free_.front());
  free_.pop_front();
  fences->insert(fences->end(), oldest.fences.begin(), oldest.fences.end());
  return oldest.buffer;
}

std::byte* Ring::take_passed(Backend* backend) {
  open();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (drop_passed(backend, &it->fences)) {
      std::byte* const buffer = it->buffer;
      free_.erase(it);
      return buffer;
    }
  }
  return nullptr;
}

void Ring::give(std::byte* buffer, Fences fences) {
  if (fences.empty()) {
    free_.push_front({buffer, {}});  // used again first: others stay untouched
  } else {
    free_.push_back({buffer, std::move(fences)});
  }
}

}  // namespace actckpt
