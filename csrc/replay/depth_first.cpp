#include "replay/depth_first.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace actckpt::replay {
namespace {

constexpr int kNone = -1;

// The step that makes each value, `kNone` if it is available.
std::vector<int> makers_of(const OrderGraph& graph) {
  std::vector<int> makers(graph.nbytes.size(), kNone);
  for (std::size_t step = 0; step < graph.makes.size(); ++step) {
    for (const int value : graph.makes[step]) makers[value] = static_cast<int>(step);
  }
  return makers;
}

class DepthFirst {
 public:
  explicit DepthFirst(const OrderGraph& graph)
      : graph_(graph), makers_(makers_of(graph)), before_(graph.reads.size()), is_needed_(graph.reads.size(), 0) {
    find_needed();
  }

  std::vector<int> order() {
    std::vector<int> forward;
    for (std::size_t step = 0; step < is_needed_.size(); ++step) {
      if (is_needed_[step] != 0) forward.push_back(static_cast<int>(step));
    }
    sort_children(forward);
    std::vector<int> chosen = walked();
    return peak_bytes(chosen) < peak_bytes(forward) ? chosen : forward;
  }

 private:
  // Finds the steps that the target depends on, and the steps that each of them reads from.
  void find_needed() {
    std::vector<int> pending = {makers_[graph_.target]};
    while (!pending.empty()) {
      const int step = pending.back();
      pending.pop_back();
      if (std::exchange(is_needed_[step], 1) != 0) continue;
      std::vector<int>& before = before_[step];
      for (const int value : graph_.reads[step]) {
        const int maker = makers_[value];
        if (maker != kNone && std::find(before.begin(), before.end(), maker) == before.end()) before.push_back(maker);
      }
      pending.insert(pending.end(), before.begin(), before.end());
    }
  }

  // Sorts what each step reads from into the best order; those are earlier steps.
  void sort_children(const std::vector<int>& forward) {
    std::vector<long long> result(graph_.reads.size()), peak(graph_.reads.size());
    for (const int step : forward) {
      for (const int value : graph_.makes[step]) result[step] += graph_.nbytes[value];
      std::vector<int>& children = before_[step];
      std::stable_sort(children.begin(), children.end(),
                       [&](int one, int other) { return result[one] - peak[one] < result[other] - peak[other]; });
      long long held = 0, most = 0;
      for (const int child : children) {
        most = std::max(most, held + peak[child]);
        held += result[child];
      }
      peak[step] = std::max(most, held + result[step]);
    }
  }

  std::vector<int> walked() const {
    std::vector<int> order;
    std::vector<char> is_done(graph_.reads.size(), 0);
    std::vector<std::pair<int, bool>> pending = {{makers_[graph_.target], false}};
    while (!pending.empty()) {
      const auto [step, is_ready] = pending.back();
      pending.pop_back();
      if (is_done[step] != 0) continue;
      if (is_ready) {
        is_done[step] = 1;
        order.push_back(step);
        continue;
      }
      pending.emplace_back(step, true);
      const std::vector<int>& children = before_[step];
      for (auto child = children.rbegin(); child != children.rend(); ++child) pending.emplace_back(*child, false);
    }
    return order;
  }

  // Peak bytes of an order: each value is held from its creation to its last use.
  long long peak_bytes(const std::vector<int>& order) const {
    std::vector<int> last_use(graph_.nbytes.size(), kNone);
    for (std::size_t at = 0; at < order.size(); ++at) {
      for (const int value : graph_.reads[order[at]]) last_use[value] = static_cast<int>(at);
    }
    long long live = 0, peak = 0;
    for (std::size_t at = 0; at < order.size(); ++at) {
      const std::vector<int>& made = graph_.makes[order[at]];
      for (const int value : made) live += graph_.nbytes[value];
      peak = std::max(peak, live);
      for (const int value : graph_.reads[order[at]]) {
        if (last_use[value] == static_cast<int>(at)) live -= freed_bytes(value);
      }
      for (const int value : made) {
        if (last_use[value] == kNone) live -= freed_bytes(value);
      }
    }
    return peak;
  }

  long long freed_bytes(int value) const {
    const bool stays = makers_[value] == kNone || value == graph_.target || graph_.is_retained[value] != 0;
    return stays ? 0 : graph_.nbytes[value];
  }

  const OrderGraph& graph_;
  std::vector<int> makers_;
  std::vector<std::vector<int>> before_;
  std::vector<char> is_needed_;
};

}  // namespace

std::vector<int> default_order(const OrderGraph& graph) { return DepthFirst(graph).order(); }

void add_order_functions(py::module_& module) {
  module.def("default_order", [](std::vector<std::vector<int>> reads, std::vector<std::vector<int>> makes,
                                 std::vector<long long> nbytes, int target, const std::unordered_set<int>& retained) {
    OrderGraph graph{std::move(reads), std::move(makes), std::move(nbytes), {}, target};
    for (std::size_t value = 0; value < graph.nbytes.size(); ++value) {
      graph.is_retained.push_back(retained.count(static_cast<int>(value)) > 0 ? 1 : 0);
    }
    return default_order(graph);
  });
}

}  // namespace actckpt::replay
