// Words that all of the simulated machine shares.
//
// Contract: the machine is one, and lives until the process ends. Thread rule: one mutex guards all of it; functions
// that take a Lock are called with it held. No Python code and no destructor of the program's objects runs under it.

#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "sim/clock.h"

namespace actckpt::sim_device {

using sim::Clock;
using Lock = std::unique_lock<std::mutex>;

inline constexpr int kNumDevices = 2;

Lock lock_machine();
// Without the lock where it cannot be had within seconds.
Lock try_lock_machine();

struct Range {
  std::uintptr_t begin = 0;
  std::uintptr_t end = 0;

  std::size_t bytes() const { return end - begin; }
  bool overlaps(const Range& other) const { return begin < other.end && other.begin < end; }
  bool contains(const Range& other) const { return begin <= other.begin && other.end <= end; }
};

inline Range range_of(const void* data, std::size_t bytes) {
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  return {begin, begin + bytes};
}

struct Stream;

// One operation as the checker knows it: the tick-th of its queue.
struct Access {
  int queue = -1;  // -1: none
  std::uint32_t tick = 0;
  const char* what = "";  // lives for good
  const Stream* stream = nullptr;
};

// What programs may not do, in words. Kept until somebody takes them; beyond the first few only counted.
class Faults {
 public:
  void add(std::string what);
  std::vector<std::string> take();

 private:
  std::vector<std::string> said_;
  std::size_t num_unsaid_ = 0;
};

Faults& faults();

// "mm on sim:0, stream 0"
std::string described(const Access& access);

// A name that lives for good.
const char* interned(const std::string& name);

}  // namespace actckpt::sim_device
