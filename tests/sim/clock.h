// Vector clocks: what happens before what.
//
// Contract: one component per queue. `a.covers(queue, tick)` is true if the tick-th operation of
// that queue happens before whatever owns clock `a`. Thread rule, ownership: a value.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace actckpt::sim {

class Clock {
 public:
  void join(const Clock& other) {
    ticks_.resize(std::max(ticks_.size(), other.ticks_.size()));
    for (std::size_t i = 0; i < other.ticks_.size(); ++i) {
      ticks_[i] = std::max(ticks_[i], other.ticks_[i]);
    }
  }
  std::uint32_t advance(int queue) {
    const auto i = static_cast<std::size_t>(queue);
    ticks_.resize(std::max(ticks_.size(), i + 1));
    return ++ticks_[i];
  }
  bool covers(int queue, std::uint32_t tick) const {
    const auto i = static_cast<std::size_t>(queue);
    return tick == 0 || (i < ticks_.size() && ticks_[i] >= tick);
  }

 private:
  std::vector<std::uint32_t> ticks_;
};

}  // namespace actckpt::sim
