#include "engine/disk/hash.h"

#include <algorithm>
#include <cstring>

namespace actckpt {
namespace {

constexpr std::uint64_t kPrime1 = 0x9E3779B185EBCA87;
constexpr std::uint64_t kPrime2 = 0xC2B2AE3D27D4EB4F;
constexpr std::uint64_t kPrime3 = 0x165667B19E3779F9;
constexpr std::uint64_t kPrime4 = 0x85EBCA77C2B2AE63;
constexpr std::uint64_t kPrime5 = 0x27D4EB2F165667C5;

constexpr std::uint64_t rotate(std::uint64_t value, int bits) { return (value << bits) | (value >> (64 - bits)); }

constexpr std::uint64_t round(std::uint64_t lane, std::uint64_t input) {
  return rotate(lane + input * kPrime2, 31) * kPrime1;
}

constexpr std::uint64_t merge(std::uint64_t hash, std::uint64_t lane) {
  return (hash ^ round(0, lane)) * kPrime1 + kPrime4;
}

template <typename T>
T load(const unsigned char* bytes) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the specification reads little endian");
  T value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

}  // namespace

Hash64::Hash64(std::uint64_t seed)
    : lanes_{seed + kPrime1 + kPrime2, seed + kPrime2, seed, seed - kPrime1}, seed_(seed) {}

void Hash64::update(const void* data, std::size_t bytes) {
  if (bytes == 0) {
    return;
  }
  const auto* in = static_cast<const unsigned char*>(data);
  const std::size_t held = total_bytes_ % kStripe;
  total_bytes_ += bytes;
  if (held > 0) {
    const std::size_t fill = std::min(kStripe - held, bytes);
    std::memcpy(pending_ + held, in, fill);
    in += fill;
    bytes -= fill;
    if (held + fill < kStripe) {
      return;
    }
    for (int i = 0; i < 4; ++i) {
      lanes_[i] = round(lanes_[i], load<std::uint64_t>(pending_ + 8 * i));
    }
  }
  std::uint64_t a = lanes_[0], b = lanes_[1], c = lanes_[2], d = lanes_[3];
  for (; bytes >= kStripe; bytes -= kStripe, in += kStripe) {
    a = round(a, load<std::uint64_t>(in));
    b = round(b, load<std::uint64_t>(in + 8));
    c = round(c, load<std::uint64_t>(in + 16));
    d = round(d, load<std::uint64_t>(in + 24));
  }
  lanes_[0] = a, lanes_[1] = b, lanes_[2] = c, lanes_[3] = d;
  std::memcpy(pending_, in, bytes);
}

std::uint64_t Hash64::digest() const {
  std::uint64_t hash = seed_ + kPrime5;
  if (total_bytes_ >= kStripe) {
    hash = rotate(lanes_[0], 1) + rotate(lanes_[1], 7) + rotate(lanes_[2], 12) + rotate(lanes_[3], 18);
    for (const std::uint64_t lane : lanes_) {
      hash = merge(hash, lane);
    }
  }
  hash += total_bytes_;
  const unsigned char* in = pending_;
  std::size_t left = total_bytes_ % kStripe;
  for (; left >= 8; left -= 8, in += 8) {
    hash = rotate(hash ^ round(0, load<std::uint64_t>(in)), 27) * kPrime1 + kPrime4;
  }
  if (left >= 4) {
    hash = rotate(hash ^ (load<std::uint32_t>(in) * kPrime1), 23) * kPrime2 + kPrime3;
    left -= 4, in += 4;
  }
  for (; left > 0; --left, ++in) {
    hash = rotate(hash ^ (*in * kPrime5), 11) * kPrime1;
  }
  hash = (hash ^ (hash >> 33)) * kPrime2;
  hash = (hash ^ (hash >> 29)) * kPrime3;
  return hash ^ (hash >> 32);
}

std::uint64_t hash64(const void* data, std::size_t bytes) {
  Hash64 hash;
  hash.update(data, bytes);
  return hash.digest();
}

}  // namespace actckpt
