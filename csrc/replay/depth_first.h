// The order of the steps of a replay that lead to its target depth first: NOTE [ Order ] in
// actckpt/_replay/schedule.py. A pure function of a small graph.
#pragma once

#include <vector>

#include "core/python.h"

namespace actckpt::replay {

// What a replay must compute, as the `ReplayGraph` of actckpt/_replay/replay_graph.py has it. Steps and values are
// numbers; steps are in the order of the forward.
struct OrderGraph {
  std::vector<std::vector<int>> reads;  // of each step, each value once
  std::vector<std::vector<int>> makes;
  std::vector<long long> nbytes;  // of each value; 0 where it is available
  std::vector<char> is_retained;  // of each value
  int target = 0;
};

// The steps that lead to the target. Depth first, the larger excess of peak over result first; the order of the forward
// where it needs no more.
std::vector<int> default_order(const OrderGraph& graph);

void add_order_functions(py::module_& module);

}  // namespace actckpt::replay
