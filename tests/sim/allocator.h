// torch's caching allocator in small: stream-ordered, and as hostile as it may be.
//
// Contract: a freed block goes back to the stream it was allocated on and is handed out again at
// once, last freed first; it is poisoned in that stream's order. A block on which record_stream was
// called for other streams waits until the host has seen them pass what they had queued when it was
// freed; record_stream for the block's own stream is ignored.
// Thread rule: one thread. Ownership: a Tensor returns its block on destruction.

#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "sim/world.h"

namespace actckpt::sim {

class Allocator;

struct Tensor {
  Allocator* allocator;
  int queue;  // allocated on
  Span span;
  Values values;  // what the program put there
  int writer;     // the queue that wrote them
  std::vector<int> recorded;

  ~Tensor();
  void record_stream(int other);
};
using TensorPtr = std::shared_ptr<Tensor>;

class Allocator {
 public:
  explicit Allocator(World* world) : world_(world) {}

  TensorPtr allocate(int queue, std::uint64_t num_cells);
  std::uint64_t num_live() const { return num_live_; }

 private:
  friend struct Tensor;
  struct Waiting {
    int queue;
    Span span;
    std::vector<int> events;
  };
  void free(Tensor* tensor);
  void reuse(int queue, Span span);
  void settle();

  World* const world_;
  std::map<std::pair<int, std::uint64_t>, std::vector<Span>> free_;  // (queue, cells): a stack
  std::vector<Waiting> waiting_;
  std::uint64_t next_address_ = std::uint64_t{1} << 60;  // far from host memory
  std::uint64_t num_live_ = 0;
};

}  // namespace actckpt::sim
