// The maximum of in-flight bytes.
//
// A number, or a value that follows the sizes of the live tickets: the square root of their sum times the largest, at
// least four of the largest. So both pending writes and prefetched bytes are small compared to what is offloaded, and
// copies still overlap. It starts anew when no ticket is left: most programs offload other sizes then. A caller that
// knows better sets a `limit`.
// Thread rule: the owner's lock.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace actckpt {

// Stands for a number of bytes.
inline constexpr std::uint64_t kFollowsSizes = std::numeric_limits<std::uint64_t>::max();

class Window {
 public:
  explicit Window(std::uint64_t bytes) : follows_(bytes == kFollowsSizes), bytes_(follows_ ? kLeast : bytes) {}

  std::uint64_t bytes() const { return follows_ && limit_ != kFollowsSizes ? limit_ : std::min(bytes_, limit_); }

  // A limit from now on, instead of the value that follows the sizes; kFollowsSizes: none.
  void limit(std::uint64_t bytes) { limit_ = bytes; }

  // A ticket of `bytes` was made.
  void add(std::uint64_t bytes) {
    live_ += bytes;
    if (!follows_) return;
    largest_ = std::max(largest_, bytes);
    const double root = std::sqrt(static_cast<double>(live_) * static_cast<double>(largest_));
    const std::uint64_t wanted = std::max(4 * largest_, static_cast<std::uint64_t>(root));
    bytes_ = std::max(bytes_, std::min(wanted, kMost));
  }

  // A ticket is gone.
  void remove(std::uint64_t bytes) {
    live_ -= bytes;
    if (!follows_ || live_ != 0) return;
    largest_ = 0;
    bytes_ = kLeast;
  }

 private:
  static constexpr std::uint64_t kLeast = std::uint64_t{4} << 20;
  static constexpr std::uint64_t kMost = std::uint64_t{256} << 20;

  bool follows_;
  std::uint64_t bytes_;
  std::uint64_t limit_ = kFollowsSizes;
  std::uint64_t live_ = 0;
  std::uint64_t largest_ = 0;
};

}  // namespace actckpt
