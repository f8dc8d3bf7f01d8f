// Time that the program waits for copies.
//
// Ownership: a Stopwatch is a value.

#pragma once

#include <chrono>

namespace actckpt {

// A shorter wait is the cost of the call, not of waiting.
inline constexpr double kLateSeconds = 50e-6;

class Stopwatch {
 public:
  double seconds() const { return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }

 private:
  const std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace actckpt
