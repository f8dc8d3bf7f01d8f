// A storage tier below pinned memory, which workers access through bounce buffers.
//
// Contract: `reserve` returns space or null, without waiting. `drain` copies a bounce buffer into reserved space,
// `fill` copies it back; both start in the background and return at once. Until `ended()`, buffer and space are in use;
// then `error()` is none, or says why the destination holds nothing. `urgent` hauls are started before others.
// Thread rule: the engine serialises calls, and calls `ended` from any thread. Ownership: space is
// given back when its last PlacePtr goes, without blocking.

#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace actckpt {

class Place {
 public:
  virtual ~Place() = default;
};
using PlacePtr = std::shared_ptr<Place>;

// The error of a worker: a value, since it is thrown in another thread.
struct HaulError {
  enum Kind { kNone, kFull, kFailed };
  Kind kind = kNone;
  std::string message;

  explicit operator bool() const { return kind != kNone; }
};

// One copy by a worker.
class Haul {
 public:
  virtual ~Haul() = default;
  virtual bool ended() = 0;
  virtual const HaulError& error() const = 0;  // after `ended`
};
using HaulPtr = std::shared_ptr<Haul>;

class Tier {
 public:
  virtual ~Tier() = default;
  virtual PlacePtr reserve(std::size_t bytes) = 0;
  virtual HaulPtr drain(const PlacePtr& place, std::byte* bounce) = 0;
  virtual HaulPtr fill(const PlacePtr& place, std::byte* bounce, bool urgent) = 0;
};

}  // namespace actckpt
