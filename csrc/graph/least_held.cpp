#include "graph/least_held.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/python.h"
#include "graph/lineage.h"

namespace actckpt::replay {
namespace {

using ValueSet = std::unordered_set<ValueObject*>;

constexpr long long kUnlimited = std::numeric_limits<long long>::max() / 4;

// Whether a value is held anyway, so that it costs no bytes.
bool is_free(ValueObject* value) {
  return value->is_needed != 0 || value->is_parameter != 0 || (is_available(value) && has_saved_tensors(value));
}

// Whether replay of other values starts from this one, which is not replayed itself.
bool is_leaf(const ValueObject* value) { return is_available(value) || is_none(value->step); }

// A flow network whose minimum cut has the fewest bytes that must be held. Each value has two nodes: its readers point
// to the first, and the second points to its inputs. The capacity of the edge between them, or from a leaf to the sink,
// is the bytes of the value.
class Network {
 public:
  explicit Network(const std::vector<ValueObject*>& candidates) : edges_of_(2) {
    for (ValueObject* value : candidates) add_edge(kSource, node_of(value), kUnlimited);
    while (!pending_.empty()) {
      ValueObject* value = pending_.back();
      pending_.pop_back();
      add(value);
    }
    while (find_levels()) add_blocking_flow();
  }

  // Of several minimum cuts, the one that keeps the fewest candidates.
  std::vector<char> kept(const std::vector<ValueObject*>& candidates) {
    std::vector<char> reaches_sink(edges_of_.size(), 0);
    std::vector<int> nodes = {kSink};
    reaches_sink[kSink] = 1;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      for (const int edge : edges_of_[nodes[i]]) {
        if (edges_[edge ^ 1].capacity == 0 || reaches_sink[edges_[edge].to] != 0) continue;
        reaches_sink[edges_[edge].to] = 1;
        nodes.push_back(edges_[edge].to);
      }
    }
    std::vector<char> flags;
    for (ValueObject* value : candidates) flags.push_back(reaches_sink[nodes_.at(value) + 1]);
    return flags;
  }

  long long num_walked() const { return static_cast<long long>(nodes_.size() + end_of_.size()); }

 private:
  static constexpr int kSource = 0, kSink = 1;

  struct Edge {
    int to;
    long long capacity;  // that is left; the reverse edge is at the index with the last bit flipped
  };

  void add_edge(int from, int to, long long capacity) {
    edges_of_[from].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({to, capacity});
    edges_of_[to].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({from, 0});
  }

  int node_of(ValueObject* value) {
    const auto [at, is_new] = nodes_.emplace(value, static_cast<int>(edges_of_.size()));
    if (is_new) {
      edges_of_.resize(edges_of_.size() + 2);
      pending_.push_back(value);
    }
    return at->second;
  }

  // Follows single inputs from a value to the first candidate, leaf or value with several inputs. The values in between
  // have no nodes: they can be replayed if and only if that one is there.
  ValueObject* end_of(ValueObject* value) {
    std::vector<ValueObject*> walked;
    while (!is_leaf(value) && is_none(value->candidate_tensor)) {
      const auto known = end_of_.find(value);
      if (known != end_of_.end()) {
        value = known->second;
        break;
      }
      ValueObject* only = only_input_of(value);
      if (only == nullptr) break;
      walked.push_back(value);
      value = only;
    }
    for (ValueObject* each : walked) end_of_[each] = value;
    return value;
  }

  // Returns the only input that is not free; null if there are none or several.
  static ValueObject* only_input_of(const ValueObject* value) {
    std::vector<ValueObject*> inputs;
    add_inputs(value, &inputs);
    ValueObject* only = nullptr;
    for (ValueObject* input : inputs) {
      if (is_free(input) || input == only) continue;
      if (only != nullptr) return nullptr;
      only = input;
    }
    return only;
  }

  void add(ValueObject* value) {
    const int node = nodes_.at(value);
    if (is_leaf(value)) {  // the program may change an input after the region: it is held for no sum of small values
      add_edge(node, kSink, value->is_input != 0 || !is_available(value) ? kUnlimited : value->nbytes);
      return;
    }
    add_edge(node, node + 1, is_none(value->candidate_tensor) ? kUnlimited : value->nbytes);
    std::vector<ValueObject*> inputs;
    add_inputs(value, &inputs);
    for (ValueObject* input : inputs) {
      if (!is_free(input)) add_edge(node + 1, node_of(end_of(input)), kUnlimited);
    }
  }

  // Dinic's algorithm. Finds the distance of each node from the source along edges with capacity. Returns false if no
  // path leads to the sink.
  bool find_levels() {
    level_of_.assign(edges_of_.size(), -1);
    next_of_.assign(edges_of_.size(), 0);
    level_of_[kSource] = 0;
    std::vector<int> nodes = {kSource};
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      for (const int edge : edges_of_[nodes[i]]) {
        const int to = edges_[edge].to;
        if (edges_[edge].capacity == 0 || level_of_[to] >= 0) continue;
        level_of_[to] = level_of_[nodes[i]] + 1;
        nodes.push_back(to);
      }
    }
    return level_of_[kSink] >= 0;
  }

  // Adds flow along shortest paths until each has an edge without capacity.
  void add_blocking_flow() {
    std::vector<int> path;  // edges from the source
    for (int node = kSource;;) {
      if (node == kSink) {
        node = add_flow(&path);
      } else if (const int edge = edge_to_next_level(node); edge >= 0) {
        path.push_back(edge);
        node = edges_[edge].to;
      } else if (path.empty()) {
        return;
      } else {
        level_of_[node] = -1;  // no path leads on from here
        node = edges_[path.back() ^ 1].to;
        path.pop_back();
      }
    }
  }

  // Returns an edge with capacity to the next level, -1 if there is none.
  int edge_to_next_level(int node) {
    for (std::size_t& next = next_of_[node]; next < edges_of_[node].size(); ++next) {
      const int edge = edges_of_[node][next];
      if (edges_[edge].capacity > 0 && level_of_[edges_[edge].to] == level_of_[node] + 1) return edge;
    }
    return -1;
  }

  // Adds flow along a path to the sink. Cuts the path off before its first edge without capacity; returns the node
  // there.
  int add_flow(std::vector<int>* path) {
    long long flow = kUnlimited;
    for (const int edge : *path) flow = std::min(flow, edges_[edge].capacity);
    std::size_t first_full = path->size();
    for (std::size_t i = path->size(); i-- > 0;) {
      Edge& edge = edges_[(*path)[i]];
      edge.capacity -= flow;
      edges_[(*path)[i] ^ 1].capacity += flow;
      if (edge.capacity == 0) first_full = i;
    }
    const int node = edges_[(*path)[first_full] ^ 1].to;
    path->resize(first_full);
    return node;
  }

  std::vector<Edge> edges_;
  std::vector<std::vector<int>> edges_of_;  // by node
  std::vector<int> level_of_;
  std::vector<std::size_t> next_of_;  // index of the first edge of a node that was not tried
  std::unordered_map<ValueObject*, int> nodes_;
  std::unordered_map<ValueObject*, ValueObject*> end_of_;
  std::vector<ValueObject*> pending_;
};

// Adds the values that a replay of `value` needs and that are not free to `reached`. Stops at candidates, as if kept.
void add_reached(ValueObject* value, ValueSet* reached) {
  std::vector<ValueObject*> pending = {value};
  while (!pending.empty()) {
    ValueObject* current = pending.back();
    pending.pop_back();
    if (current != value && (is_free(current) || !is_none(current->candidate_tensor))) continue;
    if (reached->insert(current).second && !is_leaf(current)) add_inputs(current, &pending);
  }
}

// Tells whether a value is replayed from a leaf that could be released if candidates were kept.
class ReleasableLeaves {
 public:
  // `others`: values that other values than candidates are replayed from.
  explicit ReleasableLeaves(ValueSet others) : others_(std::move(others)) {}

  bool are_below(ValueObject* value) {
    std::vector<ValueObject*> pending = {value};
    while (!pending.empty()) {
      if (is_done(pending.back(), &pending)) pending.pop_back();
    }
    return are_below_.at(value);
  }

 private:
  // Decides about a value if its inputs are decided; else adds these to `pending` and returns false.
  bool is_done(ValueObject* value, std::vector<ValueObject*>* pending) {
    if (are_below_.count(value) != 0) return true;
    if (is_leaf(value)) {
      are_below_[value] = others_.count(value) == 0 && is_unshared(value);
      return true;
    }
    std::vector<ValueObject*> inputs;
    add_inputs(value, &inputs);
    const std::size_t before = pending->size();
    bool is_any = false;
    for (ValueObject* input : inputs) {
      if (is_free(input)) continue;
      const auto known = are_below_.find(input);
      if (known == are_below_.end()) {
        pending->push_back(input);
      } else {
        is_any = is_any || known->second;
      }
    }
    if (pending->size() > before) return false;
    are_below_[value] = is_any;
    return true;
  }

  const ValueSet others_;
  std::unordered_map<ValueObject*, bool> are_below_;
};

}  // namespace

std::vector<char> kept_of(const std::vector<ValueObject*>& candidates, long long* num_walked) {
  Network network(candidates);
  *num_walked = network.num_walked();
  return network.kept(candidates);
}

bool is_unshared(const ValueObject* value) {
  return !is_none(value->held) && Py_REFCNT(value->held) == 1 &&
         call_with(names().is_unshared, value->held).ptr() == Py_True;
}

std::vector<char> frees_leaves(TapeObject* tape, const std::vector<ValueObject*>& candidates) {
  // The program may still save values that are replayed from these.
  ValueSet others;
  PyObject *key, *known;
  Py_ssize_t position = 0;
  while (PyDict_Next(tape->storages, &position, &key, &known) != 0) {
    auto* value = reinterpret_cast<ValueObject*>(reinterpret_cast<KnownStorageObject*>(known)->value);
    if (value->was_saved == 0 && !is_leaf(value)) add_reached(value, &others);
  }
  ReleasableLeaves leaves(std::move(others));
  std::vector<char> flags;
  for (ValueObject* value : candidates) flags.push_back(leaves.are_below(value) ? 1 : 0);
  return flags;
}

}  // namespace actckpt::replay
