// Depth-first order of the steps that a target depends on: see actckpt/_replay/schedule.py. A pure
// function of a small graph.
#pragma once

#include <vector>

#include "core/python.h"

namespace actckpt::replay {

// What a replay must compute; the `ReplayGraph` of actckpt/_replay/replay_graph.py. Steps and values are numbers; steps
// are in forward order.
struct OrderGraph {
  std::vector<std::vector<int>> reads;  // of each step, without repeats
  std::vector<std::vector<int>> makes;
  std::vector<long long> nbytes;  // of each value; 0: available
  std::vector<char> is_retained;  // of each value
  int target = 0;
};

// The steps that the target depends on, depth first, the larger excess of peak over result first. Forward order where
// that needs no more memory.
std::vector<int> default_order(const OrderGraph& graph);

void add_order_functions(py::module_& module);

}  // namespace actckpt::replay
