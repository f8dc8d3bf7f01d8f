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

// Whether to have a value costs nothing: it is held anyway.
bool is_free(const ValueObject* value) {
  return value->is_needed != 0 || value->is_parameter != 0 || (is_available(value) && value->handles.size > 0);
}

// Whether replay of others ends at a value, which is not replayed itself.
bool is_leaf(const ValueObject* value) { return is_available(value) || is_none(value->step); }

// A network whose minimum cut is what is held at least. Each value has a node where it is read, and the next one where
// it is replayed. Between them, or between a leaf and the sink, are the bytes that it takes to hold the value.
class Network {
 public:
  explicit Network(const std::vector<ValueObject*>& candidates) : edges_of_(2) {
    for (ValueObject* value : candidates) add_edge(kSource, node_of(value), kUnlimited);
    while (!pending_.empty()) {
      ValueObject* value = pending_.back();
      pending_.pop_back();
      add(value);
    }
    while (find_levels()) send();
  }

  // Of several minimum cuts, the one that keeps the fewest candidates.
  std::vector<char> kept(const std::vector<ValueObject*>& candidates) {
    std::vector<char> reaches_sink(edges_of_.size(), 0);
    std::vector<int> nodes = {kSink};
    reaches_sink[kSink] = 1;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      for (const int edge : edges_of_[nodes[i]]) {
        if (edges_[edge ^ 1].room == 0 || reaches_sink[edges_[edge].to] != 0) continue;
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
    long long room;  // for more flow; the edge back is at the index with the last bit flipped
  };

  void add_edge(int from, int to, long long room) {
    edges_of_[from].push_back(static_cast<int>(edges_.size()));
    edges_.push_back({to, room});
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

  // What a value that is not free costs to have: the values between it and a candidate, a leaf or a fork are skipped.
  ValueObject* end_of(ValueObject* value) {
    std::vector<ValueObject*> walked;
    while (!is_leaf(value) && is_none(value->spare)) {
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

  // The input of a value that is not free, null if it has none or several.
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
    add_edge(node, node + 1, is_none(value->spare) ? kUnlimited : value->nbytes);
    std::vector<ValueObject*> inputs;
    add_inputs(value, &inputs);
    for (ValueObject* input : inputs) {
      if (!is_free(input)) add_edge(node + 1, node_of(end_of(input)), kUnlimited);
    }
  }

  // Dinic's algorithm: numbers nodes by their distance from the source, along edges with room; false: no way leads to
  // the sink.
  bool find_levels() {
    level_of_.assign(edges_of_.size(), -1);
    next_of_.assign(edges_of_.size(), 0);
    level_of_[kSource] = 0;
    std::vector<int> nodes = {kSource};
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      for (const int edge : edges_of_[nodes[i]]) {
        const int to = edges_[edge].to;
        if (edges_[edge].room == 0 || level_of_[to] >= 0) continue;
        level_of_[to] = level_of_[nodes[i]] + 1;
        nodes.push_back(to);
      }
    }
    return level_of_[kSink] >= 0;
  }

  // Sends flow along shortest ways until each has an edge without room.
  void send() {
    std::vector<int> way;  // edges from the source
    for (int node = kSource;;) {
      if (node == kSink) {
        node = send_along(&way);
      } else if (const int edge = edge_onward(node); edge >= 0) {
        way.push_back(edge);
        node = edges_[edge].to;
      } else if (way.empty()) {
        return;
      } else {
        level_of_[node] = -1;  // no way leads on from here
        node = edges_[way.back() ^ 1].to;
        way.pop_back();
      }
    }
  }

  // An edge with room to the next level, -1 if there is none.
  int edge_onward(int node) {
    for (std::size_t& next = next_of_[node]; next < edges_of_[node].size(); ++next) {
      const int edge = edges_of_[node][next];
      if (edges_[edge].room > 0 && level_of_[edges_[edge].to] == level_of_[node] + 1) return edge;
    }
    return -1;
  }

  // Fills a way to the sink. Cuts it off before the first edge without room; returns the node there.
  int send_along(std::vector<int>* way) {
    long long flow = kUnlimited;
    for (const int edge : *way) flow = std::min(flow, edges_[edge].room);
    std::size_t first_full = way->size();
    for (std::size_t i = way->size(); i-- > 0;) {
      Edge& edge = edges_[(*way)[i]];
      edge.room -= flow;
      edges_[(*way)[i] ^ 1].room += flow;
      if (edge.room == 0) first_full = i;
    }
    const int node = edges_[(*way)[first_full] ^ 1].to;
    way->resize(first_full);
    return node;
  }

  std::vector<Edge> edges_;
  std::vector<std::vector<int>> edges_of_;  // by node
  std::vector<int> level_of_;
  std::vector<std::size_t> next_of_;  // of the edges of a node, the first that may lead on
  std::unordered_map<ValueObject*, int> nodes_;
  std::unordered_map<ValueObject*, ValueObject*> end_of_;
  std::vector<ValueObject*> pending_;
};

// Adds what replaying `value` would newly hold to `reached`; ends at candidates, as if they were kept.
void add_reached(ValueObject* value, ValueSet* reached) {
  std::vector<ValueObject*> pending = {value};
  while (!pending.empty()) {
    ValueObject* current = pending.back();
    pending.pop_back();
    if (current != value && (is_free(current) || !is_none(current->spare))) continue;
    if (reached->insert(current).second && !is_leaf(current)) add_inputs(current, &pending);
  }
}

// Whether values are replayed from a leaf that nothing but the region and the candidates holds.
class ReleasableLeaves {
 public:
  // `others`: what other values are replayed from.
  explicit ReleasableLeaves(ValueSet others) : others_(std::move(others)) {}

  bool are_below(ValueObject* value) {
    std::vector<ValueObject*> pending = {value};
    while (!pending.empty()) {
      if (is_done(pending.back(), &pending)) pending.pop_back();
    }
    return are_below_.at(value);
  }

 private:
  // Looks at a value whose inputs were looked at; adds those that were not.
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
  // What the program may save yet is replayed from these, whatever becomes of the candidates.
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
