#include "engine/disk/hash.h"

#include <cstring>
#include <initializer_list>

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

std::uint64_t hash64(const void* data, std::size_t bytes) {
  constexpr std::size_t kStripe = 32;
  const auto* in = static_cast<const unsigned char*>(data);
  std::size_t left = bytes;
  std::uint64_t hash = kPrime5;
  if (left >= kStripe) {
    std::uint64_t a = kPrime1 + kPrime2, b = kPrime2, c = 0, d = 0 - kPrime1;
    for (; left >= kStripe; left -= kStripe, in += kStripe) {
      a = round(a, load<std::uint64_t>(in));
      b = round(b, load<std::uint64_t>(in + 8));
      c = round(c, load<std::uint64_t>(in + 16));
      d = round(d, load<std::uint64_t>(in + 24));
    }
    hash = rotate(a, 1) + rotate(b, 7) + rotate(c, 12) + rotate(d, 18);
    for (const std::uint64_t lane : {a, b, c, d}) {
      hash = merge(hash, lane);
    }
  }
  hash += bytes;
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

}  // namespace actckpt
