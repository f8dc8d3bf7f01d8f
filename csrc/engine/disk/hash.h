// XXH64: a 64-bit checksum at memory speed.
//
// Contract: gives the values of the published algorithm (Yann Collet, xxHash specification 0.1.1),
// whatever the pieces the bytes come in. It finds accidents, not attacks.
// Thread rule: one thread per object. Ownership: a value.

#pragma once

#include <cstddef>
#include <cstdint>

namespace actckpt {

class Hash64 {
 public:
  explicit Hash64(std::uint64_t seed = 0);

  void update(const void* data, std::size_t bytes);

  // May be called at any time; more updates may follow.
  std::uint64_t digest() const;

 private:
  static constexpr std::size_t kStripe = 32;

  std::uint64_t lanes_[4];
  std::uint64_t seed_;
  std::uint64_t total_bytes_ = 0;
  unsigned char pending_[kStripe];  // the last total_bytes_ % kStripe bytes
};

std::uint64_t hash64(const void* data, std::size_t bytes);

}  // namespace actckpt
