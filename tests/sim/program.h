// A random training program that offloads every saved tensor through the event protocol.
//
// Contract: the program itself is right: run by plain autograd it has no race. It uses several
// streams and devices, saves inputs before and outputs after their kernels, saves one tensor for
// several nodes, keeps several graphs alive and runs their backwards interleaved, reads on other
// streams than it saved on, goes through some graphs twice, prefetches what it will and will not
// read, abandons graphs in the middle, and tries again where the tier gives no bytes. So every race, wrong value or
// leak is the protocol's. Thread rule: one thread. Ownership: borrows the world, shares the engine.

#pragma once

#include <list>
#include <memory>
#include <string>
#include <vector>

#include "engine/protocol/device_engine.h"
#include "sim/allocator.h"
#include "sim/sim_tier.h"
#include "sim/world.h"

namespace actckpt::sim {

struct Report {
  std::uint64_t num_races = 0;
  std::uint64_t num_wrong = 0;        // values read that are not the program's
  std::uint64_t num_leaked = 0;       // tensors, tickets and slots left at the end
  std::uint64_t num_errors = 0;       // device errors that reached the program
  std::uint64_t num_faults = 0;       // what the mock driver objects to
  std::uint64_t num_failed_gets = 0;  // the tier gave no bytes; the program tried again
  std::vector<std::string> races;
  DeviceStats stats;
};

// The machine of one program: its user streams. Queue q is stream handle q + 1; default_queues[d]
// is handle 0 of device d.
struct Machine {
  World* world;
  std::vector<int> default_queues;
  std::vector<std::vector<int>> user_queues;  // per device, the default one first

  static Machine make(World* world);
  Stream stream_of(int queue) const;
  int queue_of(Stream stream) const;
};

class Program {
 public:
  Program(Machine machine, std::shared_ptr<DeviceEngine> engine);

  // Runs the program to its end and returns what was found. Call once.
  Report run(const Pool& pool, const SimTier& tier);

 private:
  struct Saved;
  using SavedPtr = std::shared_ptr<Saved>;
  struct Node {
    int queue;
    std::vector<SavedPtr> saves;
  };
  struct Graph {
    int device;
    std::vector<Node> nodes;
    TensorPtr output;
    TensorPtr grad;
    std::size_t left = 0;  // nodes that this pass has not run
    int num_passes = 0;    // 0: still in forward
  };

  void forward(Graph* graph);
  bool backward(Graph* graph);
  void backward_node(Graph* graph, Node* node);
  void reload(Saved* saved, Stream stream, Side side);
  void prefetch_some(const Graph& graph);
  SavedPtr save(const TensorPtr& tensor, int queue);
  TensorPtr unpack(Saved* saved, int queue);
  void consume_elsewhere(Saved* saved, int queue);
  void order(int queue, const TensorPtr& tensor);
  TensorPtr launch(int queue, const std::vector<TensorPtr>& inputs);
  void finish(Releases* releases);
  int pick_queue(int device);

  const Machine machine_;
  World* const world_;
  Allocator allocator_;
  const std::shared_ptr<DeviceEngine> engine_;
  std::list<Graph> graphs_;
  std::vector<TensorPtr> alive_;  // held by the user's code
  std::vector<std::pair<std::weak_ptr<Tensor>, std::weak_ptr<Saved>>> known_;
  std::uint64_t next_value_ = 1;
  std::uint64_t num_errors_ = 0;
  std::uint64_t num_failed_gets_ = 0;
};

}  // namespace actckpt::sim
