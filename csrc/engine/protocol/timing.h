// How long the program waited for one ticket, measured on the device and on the host.
//
// Contract: a Timing outlives its ticket, so that the next step can be planned by it. Waits of a
// stream are measured by a pair of events around the wait, read once both have passed: nobody waits
// for a figure. `is_settled` is false while some are still to come. A wait of less than
// kLateSeconds is the cost of asking, not of waiting.
// Thread rule: Timing from any thread; StreamWaits: the owner serialises. Ownership: shared.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>

#include "engine/protocol/backend.h"

namespace actckpt {

inline constexpr double kLateSeconds = 50e-6;

class Timing {
 public:
  void add_stall(double seconds) {
    stall_ns_ += static_cast<std::int64_t>(seconds * 1e9);
    if (seconds >= kLateSeconds) {
      late_ = true;
    }
  }
  void begin() { ++num_open_; }
  void end() { --num_open_; }

  double stall_seconds() const { return static_cast<double>(stall_ns_) * 1e-9; }
  bool is_late() const { return late_; }
  bool is_settled() const { return num_open_ == 0; }

 private:
  std::atomic<std::int64_t> stall_ns_{0};
  std::atomic<bool> late_{false};
  std::atomic<int> num_open_{0};
};
using TimingPtr = std::shared_ptr<Timing>;

class Stopwatch {
 public:
  double seconds() const {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

// Waits of streams whose length is not known yet.
class StreamWaits {
 public:
  // `stream` waits for `event` on behalf of `timing`.
  void wait(Backend* backend, Stream stream, const EventPtr& event, const TimingPtr& timing);

  // Adds up what has passed; returns the seconds, and how many waits were late.
  struct Sum {
    double seconds = 0.0;
    std::uint64_t num_late = 0;
  };
  Sum settle(Backend* backend);

 private:
  struct Wait {
    EventPtr before;
    EventPtr after;
    TimingPtr timing;
  };
  std::deque<Wait> waits_;
};

}  // namespace actckpt
