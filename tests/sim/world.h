// A machine of queues run by a seeded adversary.
//
// Contract: operations are put into queues (one per stream) by the host and run later, in any order
// that queues and event waits allow; the adversary takes steps whenever the host calls. An event
// captures its queue at record time, as CUDA's do. Reads check their values against what the
// program computed on the host, writes store them; the checker judges every access by
// happens-before when it is put into the queue. Nothing here knows the engine.
// Thread rule: one thread. Ownership: owns queues, events, memory contents; addresses are only
// names.

#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <random>
#include <string>
#include <unordered_map>
#include <vector>

#include "sim/checker.h"
#include "sim/clock.h"

namespace actckpt::sim {

inline constexpr std::uint64_t kPoison = 0xDEADDEADDEADDEAD;

struct Span {
  std::uint64_t address;
  std::uint64_t num_cells;
};

using Values = std::vector<std::uint64_t>;

class World {
 public:
  explicit World(std::uint64_t seed);

  int add_queue(int device);
  int device_of(int queue) const { return queues_[static_cast<std::size_t>(queue)].device; }
  int num_queues() const { return static_cast<int>(queues_.size()); }

  // Events. `record` makes a new event; handles are never used again.
  int record(int queue);
  void wait(int queue, int event);
  bool passed(int event);                   // the host learns of it
  std::uint64_t time_of(int event) const {  // in operations that ran before it; of passed events
    return events_[static_cast<std::size_t>(event)].time;
  }

  // Work. A kernel checks that `reads` hold `expected` and writes `values`.
  struct Input {
    Span span;
    const Values* expected;
  };
  void kernel(int queue, const std::vector<Input>& reads, Span written, const Values& values);
  void copy(int queue, Span dst, Span src, const char* what);
  void poison(int queue, Span span);

  // How many operations run by themselves per host call; 0: none until `drain`.
  void set_eagerness(double steps) { eagerness_ = steps; }

  // Runs a few operations, also of a starved queue: what happens while the host waits.
  void step();

  // Runs everything that can run.
  void drain();

  std::mt19937_64& rng() { return rng_; }
  std::uint64_t below(std::uint64_t n) { return rng_() % n; }
  bool chance(double p) { return static_cast<double>(rng_() >> 11) * 0x1p-53 < p; }

  std::uint64_t num_wrong() const { return num_wrong_; }
  const Checker& checker() const { return checker_; }

 private:
  struct Operation {
    std::function<void()> effect;
    int waits_for = -1;  // event
    int records = -1;    // event
  };
  struct Queue {
    int device;
    Clock clock;
    std::deque<Operation> pending;
  };
  struct EventState {
    Clock clock;
    bool passed = false;
    std::uint64_t time = 0;
  };

  std::uint32_t begin(int queue);
  void touch(int queue, std::uint32_t tick, Span span, bool writes, const char* what);
  void push(int queue, Operation operation);
  bool run_one(int queue);
  void let_adversary_run();

  std::mt19937_64 rng_;
  double eagerness_;
  int starved_ = -1;
  Clock host_;
  std::vector<Queue> queues_;
  std::vector<EventState> events_;
  std::unordered_map<std::uint64_t, std::uint64_t> memory_;
  Checker checker_;
  std::uint64_t num_wrong_ = 0;
  std::uint64_t num_run_ = 0;
};

}  // namespace actckpt::sim
