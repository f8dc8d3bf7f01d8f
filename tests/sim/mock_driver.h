// A CUDA driver whose devices are the queues of a World: the recorded calls are what the checker
// judges.
//
// Contract: as the real driver where the engine can tell: a stack of current contexts per process,
// handle 0 means the current context's default stream, an event is recorded in the context it was
// made in, a never recorded event has passed, capture makes queries and unsafe calls fail outside
// RELAXED mode, waits of a capturing stream on outside events break the capture. What a right
// engine never does is a fault: see `faults()`. `fail_at` makes the n-th call that can fail return
// a code.
// Thread rule: one driver at a time, one thread: the table is made of plain functions.
// Ownership: borrows the world.

#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "engine/cuda/driver.h"
#include "sim/world.h"

namespace actckpt::sim {

class MockDriver {
 public:
  MockDriver(World* world, std::vector<int> default_queues);
  ~MockDriver();
  MockDriver(const MockDriver&) = delete;
  MockDriver& operator=(const MockDriver&) = delete;

  const cuda::Driver* table() const;

  // From now on the n-th failable call returns `code`, and so do all later ones.
  void fail_at(std::uint64_t n, cuda::Result code);
  void set_capturing(int queue, bool capturing) { capturing_[queue] = capturing; }
  void refuse_pins(bool refuse) { refuse_pins_ = refuse; }
  // Whether the calling thread may wait now: unpinning memory waits for the device.
  void set_may_wait(std::function<bool()> may_wait) { may_wait_ = std::move(may_wait); }
  // The node of host memory nearest to the devices; -1: unknown.
  void set_node(int node) { node_ = node; }

  std::uint64_t num_calls() const { return num_calls_; }
  std::uint64_t num_pinned_bytes() const;
  const std::vector<std::string>& faults() const { return faults_; }
  std::size_t num_contexts_pushed() const { return stack_.size(); }

 private:
  friend struct MockCalls;
  struct Event {
    int device;
    bool is_timed = false;
    int recorded = -1;
  };
  bool fails();
  void fault(const std::string& what);
  int queue_of(cuda::StreamHandle stream);
  bool any_capturing() const;
  bool is_pinned(std::uintptr_t ptr, std::size_t bytes) const;

  World* const world_;
  const std::vector<int> default_queues_;
  std::vector<int> stack_;  // devices of current contexts
  std::vector<std::unique_ptr<Event>> events_;
  std::map<int, bool> capturing_;
  std::map<std::uintptr_t, std::size_t> pinned_;
  std::vector<std::string> faults_;
  int capture_mode_ = 0;
  bool refuse_pins_ = false;
  std::function<bool()> may_wait_ = [] { return true; };
  int node_ = -1;
  std::uint64_t num_calls_ = 0;
  std::uint64_t fail_at_ = UINT64_MAX;
  cuda::Result failure_ = 0;
};

}  // namespace actckpt::sim
