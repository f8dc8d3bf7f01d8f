#include "engine/host/buffers.h"

#include <algorithm>
#include <utility>

#include "engine/memory/extents.h"

namespace actckpt {
namespace {

// Smaller ones come from malloc: a mapping each would exceed the system's number of mappings.
constexpr std::size_t kOwnMapping = std::size_t{256} << 10;

}  // namespace

Buffer Buffers::take(std::size_t bytes) {
  if (bytes < kOwnMapping) {
    return Buffer(new std::byte[bytes], std::default_delete<std::byte[]>());
  }
  const std::size_t wanted = round_up(bytes, kGranule);
  std::unique_ptr<Slab> slab = take_free(wanted);
  if (slab == nullptr) {
    slab = std::make_unique<Slab>(wanted, nullptr);
  }
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    used_bytes_ += slab->bytes();
    peak_used_bytes_ = std::max(peak_used_bytes_, used_bytes_);
  }
  std::byte* const data = slab->data();
  return Buffer(data, [self = shared_from_this(), owned = slab.release()](std::byte*) {
    if (!self->fork_guard_.forked()) {
      self->give(std::unique_ptr<Slab>(owned));
    }
  });
}

// The smallest that is free, if it is not more than twice as large.
std::unique_ptr<Slab> Buffers::take_free(std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const std::size_t found = (*it)->bytes();
    if (found >= bytes && found <= 2 * bytes && (best == free_.end() || found < (*best)->bytes())) {
      best = it;
    }
  }
  if (best == free_.end()) {
    return nullptr;
  }
  std::unique_ptr<Slab> slab = std::move(*best);
  free_.erase(best);
  free_bytes_ -= slab->bytes();
  return slab;
}

void Buffers::give(std::unique_ptr<Slab> slab) {
  std::vector<std::unique_ptr<Slab>> unmapped;  // after the lock
  const std::lock_guard<std::mutex> lock(mutex_);
  used_bytes_ -= slab->bytes();
  free_bytes_ += slab->bytes();
  free_.push_back(std::move(slab));
  while (used_bytes_ + free_bytes_ > peak_used_bytes_) {
    free_bytes_ -= free_.front()->bytes();
    unmapped.push_back(std::move(free_.front()));
    free_.erase(free_.begin());
  }
}

std::uint64_t Buffers::trim() {
  std::vector<std::unique_ptr<Slab>> unmapped;
  const std::lock_guard<std::mutex> lock(mutex_);
  unmapped.swap(free_);
  peak_used_bytes_ = used_bytes_;
  return std::exchange(free_bytes_, 0);
}

}  // namespace actckpt
