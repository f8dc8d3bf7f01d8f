#include "graph/least_held.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "graph/lineage.h"

namespace actckpt::replay {
namespace {

constexpr long long kUnlimited = std::numeric_limits<long long>::max() / 4;

// A network of capacities, and the flow through it (Dinic's algorithm).
class Network {
 public:
  Network() : edges_of_(2) {}  // the source, 0, and the sink, 1

  int add_node() {
    edges_of_.emplace_back();
    return static_cast<int>(edges_of_.size()) - 1;
  }

  void add_edge(int from, int to, long long capacity) {
    edges_of_[from].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({to, capacity});
    edges_of_[to].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({from, 0});
  }

  // Sends as much as possible from the source to the sink; returns which nodes the minimal cut leaves beside the sink:
  // of several such cuts, the one nearest to it.
  std::vector<char> sink_side() {
    while (find_levels()) {
      next_.assign(edges_of_.size(), 0);
      while (augment()) {
      }
    }
    std::vector<char> reaches(edges_of_.size(), 0);
    std::vector<int> pending = {1};
    reaches[1] = 1;
    while (!pending.empty()) {
      const int node = pending.back();
      pending.pop_back();
      for (const int edge : edges_of_[node]) {
        const int before = edges_[edge].to;
        if (reaches[before] == 0 && edges_[edge ^ 1].capacity > 0) {
          reaches[before] = 1;
          pending.push_back(before);
        }
      }
    }
    return reaches;
  }

 private:
  struct Edge {
    int to;
    long long capacity;  // that is left; the edge back is at the index with the last bit flipped
  };

  bool find_levels() {
    levels_.assign(edges_of_.size(), -1);
    levels_[0] = 0;
    std::vector<int> queue = {0};
    for (std::size_t i = 0; i < queue.size(); ++i) {
      for (const int edge : edges_of_[queue[i]]) {
        const Edge& next = edges_[edge];
        if (next.capacity > 0 && levels_[next.to] < 0) {
          levels_[next.to] = levels_[queue[i]] + 1;
          queue.push_back(next.to);
        }
      }
    }
    return levels_[1] >= 0;
  }

  // Sends flow along one path of ascending levels.
  bool augment() {
    std::vector<int> path;
    int node = 0;
    while (node != 1) {
      std::size_t& next = next_[node];
      while (next < edges_of_[node].size() && !goes_on(node, edges_of_[node][next])) ++next;
      if (next < edges_of_[node].size()) {
        path.push_back(edges_of_[node][next]);
        node = edges_[path.back()].to;
      } else if (path.empty()) {
        return false;
      } else {  // a dead end
        node = edges_[path.back() ^ 1].to;
        path.pop_back();
        ++next_[node];
      }
    }
    long long flow = kUnlimited;
    for (const int edge : path) flow = std::min(flow, edges_[edge].capacity);
    for (const int edge : path) {
      edges_[edge].capacity -= flow;
      edges_[edge ^ 1].capacity += flow;
    }
    return true;
  }

  bool goes_on(int node, int edge) const {
    return edges_[edge].capacity > 0 && levels_[edges_[edge].to] == levels_[node] + 1;
  }

  std::vector<Edge> edges_;
  std::vector<std::vector<int>> edges_of_;
  std::vector<int> levels_;
  std::vector<std::size_t> next_;
};

// Whether to have a value costs nothing: it is held anyway.
bool is_free(const ValueObject* value) {
  return value->is_needed != 0 || value->is_parameter != 0 || (is_available(value) && value->handles.size > 0);
}

class Graph {
 public:
  explicit Graph(const std::vector<ValueObject*>& candidates) {
    for (ValueObject* value : candidates) network_.add_edge(0, node_of(value), kUnlimited);
    while (!pending_.empty()) {
      ValueObject* value = pending_.back();
      pending_.pop_back();
      add(value);
    }
  }

  std::vector<Verdict> verdicts(const std::vector<ValueObject*>& candidates) {
    const std::vector<char> at_sink = network_.sink_side();
    std::unordered_set<ValueObject*> kept;
    std::vector<ValueObject*> recomputed;
    for (ValueObject* value : candidates) {
      if (at_sink[nodes_.at(value) + 1] != 0) {
        kept.insert(value);
      } else {
        recomputed.push_back(value);
      }
    }
    const std::unordered_set<ValueObject*> read = read_by(std::move(recomputed), kept);
    std::vector<Verdict> found;
    for (ValueObject* value : candidates) {
      found.push_back(kept.count(value) == 0   ? Verdict::recompute
                      : read.count(value) == 0 ? Verdict::keep
                                               : Verdict::keep_for_others);
    }
    return found;
  }

 private:
  // The node where a value is asked for; the next one is where it is recomputed.
  int node_of(ValueObject* value) {
    const auto [at, is_new] = nodes_.emplace(value, 0);
    if (is_new) {
      at->second = network_.add_node();
      network_.add_node();
      pending_.push_back(value);
    }
    return at->second;
  }

  void add(ValueObject* value) {
    const int node = nodes_.at(value);
    if (is_available(value) || is_none(value->step)) {
      network_.add_edge(node, 1, is_available(value) ? value->nbytes : kUnlimited);
      return;
    }
    network_.add_edge(node, node + 1, is_none(value->spare) ? kUnlimited : value->nbytes);
    std::vector<ValueObject*> inputs;
    add_inputs(value, &inputs);
    std::sort(inputs.begin(), inputs.end());
    inputs.erase(std::unique(inputs.begin(), inputs.end()), inputs.end());
    for (ValueObject* input : inputs) {
      if (!is_free(input)) network_.add_edge(node + 1, node_of(input), kUnlimited);
    }
  }

  // What recomputing the values reads, up to those that are kept.
  static std::unordered_set<ValueObject*> read_by(std::vector<ValueObject*> pending,
                                                  const std::unordered_set<ValueObject*>& kept) {
    std::unordered_set<ValueObject*> seen(pending.begin(), pending.end());
    std::vector<ValueObject*> inputs;
    while (!pending.empty()) {
      ValueObject* value = pending.back();
      pending.pop_back();
      if (kept.count(value) != 0 || is_available(value) || is_none(value->step)) continue;
      inputs.clear();
      add_inputs(value, &inputs);
      for (ValueObject* input : inputs) {
        if (!is_free(input) && seen.insert(input).second) pending.push_back(input);
      }
    }
    return seen;
  }

  Network network_;
  std::unordered_map<ValueObject*, int> nodes_;
  std::vector<ValueObject*> pending_;
};

}  // namespace

std::vector<Verdict> verdicts(const std::vector<ValueObject*>& candidates) {
  return Graph(candidates).verdicts(candidates);
}

}  // namespace actckpt::replay
