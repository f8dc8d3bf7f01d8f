#include "engine/disk/bounce.h"

#include <utility>

namespace actckpt {

BounceRing::Lease::Lease(Lease&& other) noexcept : ring_(std::exchange(other.ring_, nullptr)), data_(other.data_) {}

BounceRing::Lease::~Lease() noexcept {
  if (ring_ == nullptr) {
    return;
  }
  const std::lock_guard<std::mutex> lock(ring_->mutex_);
  ring_->free_.push_back(data_);  // capacity was reserved
  ring_->returned_.notify_one();
}

BounceRing::BounceRing(int num_buffers, std::size_t buffer_bytes)
    : buffer_bytes_(buffer_bytes), num_unmapped_(num_buffers) {
  slabs_.reserve(static_cast<std::size_t>(num_buffers));
  free_.reserve(static_cast<std::size_t>(num_buffers));
}

BounceRing::Lease BounceRing::lease() {
  std::unique_lock<std::mutex> lock(mutex_);
  if (free_.empty() && num_unmapped_ > 0) {
    slabs_.emplace_back(buffer_bytes_, nullptr);
    --num_unmapped_;
    return Lease(this, slabs_.back().data());
  }
  returned_.wait(lock, [&] { return !free_.empty(); });
  std::byte* const data = free_.back();
  free_.pop_back();
  return Lease(this, data);
}

}  // namespace actckpt
