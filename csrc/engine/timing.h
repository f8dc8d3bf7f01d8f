// How long the program waited for one ticket, on the device and on the host.
//
// Contract: a Timing outlives its ticket, so that the next step can be planned by it. `is_settled`
// is false while some waits are still to be measured. A wait of less than kLateSeconds is the cost
// of asking, not of waiting.
// Thread rule: any thread. Ownership: shared; Stopwatch is a value.

#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

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
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace actckpt
