// Durations of stream waits, measured without blocking anyone.
//
// Contract: a wait is measured by a pair of events around it, read once both have passed.
// Thread rule: the owner serialises. Ownership: shares the events.

#pragma once

#include <cstdint>
#include <deque>

#include "engine/protocol/backend.h"
#include "engine/timing.h"

namespace actckpt {

class StreamWaits {
 public:
  // `stream` waits for `event`.
  void wait(Backend* backend, Stream stream, const EventPtr& event);

  // Adds up the waits that have passed; returns the seconds, and how many were late.
  struct Sum {
    double seconds = 0.0;
    std::uint64_t num_late = 0;
  };
  Sum settle(Backend* backend);

 private:
  struct Wait {
    EventPtr before;
    EventPtr after;
  };
  std::deque<Wait> waits_;
};

}  // namespace actckpt
