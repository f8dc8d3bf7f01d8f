#include "graph/least_held.h"

#include <algorithm>
#include <limits>
#include <unordered_map>
#include <unordered_set>

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

// A network whose minimal cut is what is held at least. Each value has a node where it is asked for, and the next one
// where it is replayed. Between them, or between a leaf and the sink, are the bytes that it takes to hold the value.
class Network {
 public:
  explicit Network(const std::vector<ValueObject*>& candidates) : edges_of_(2) {
    for (ValueObject* value : candidates) add_edge(kSource, node_of(value), kUnlimited);
    while (!pending_.empty()) {
      ValueObject* value = pending_.back();
      pending_.pop_back();
      add(value);
    }
    while (augment()) {
    }
  }

  // Of several minimal cuts, the one that keeps the fewest candidates.
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
    std::vector<char> found;
    for (ValueObject* value : candidates) found.push_back(reaches_sink[nodes_.at(value) + 1]);
    return found;
  }

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
      if (!is_free(input)) add_edge(node + 1, node_of(input), kUnlimited);
    }
  }

  // Sends more flow along a shortest way with room; false: there is none.
  bool augment() {
    std::vector<int> come_by(edges_of_.size(), -1);
    std::vector<int> nodes = {kSource};
    for (std::size_t i = 0; i < nodes.size() && come_by[kSink] < 0; ++i) {
      for (const int edge : edges_of_[nodes[i]]) {
        const int next = edges_[edge].to;
        if (edges_[edge].room == 0 || next == kSource || come_by[next] >= 0) continue;
        come_by[next] = edge;
        nodes.push_back(next);
      }
    }
    if (come_by[kSink] < 0) return false;
    long long flow = kUnlimited;
    for (int node = kSink; node != kSource; node = edges_[come_by[node] ^ 1].to) {
      flow = std::min(flow, edges_[come_by[node]].room);
    }
    for (int node = kSink; node != kSource; node = edges_[come_by[node] ^ 1].to) {
      edges_[come_by[node]].room -= flow;
      edges_[come_by[node] ^ 1].room += flow;
    }
    return true;
  }

  std::vector<Edge> edges_;
  std::vector<std::vector<int>> edges_of_;  // by node
  std::unordered_map<ValueObject*, int> nodes_;
  std::vector<ValueObject*> pending_;
};

// Walks to what replaying `value` would newly hold, until a leaf is unshared and not among `others`: whether there is
// one. Without `others`, ends at candidates, too: as if they were kept. `seen` is what was walked.
bool find_leaf(ValueObject* value, const ValueSet* others, ValueSet* seen) {
  std::vector<ValueObject*> pending = {value};
  while (!pending.empty()) {
    ValueObject* current = pending.back();
    pending.pop_back();
    if (current != value && (is_free(current) || (others == nullptr && !is_none(current->spare)))) continue;
    if (!seen->insert(current).second) continue;
    if (!is_leaf(current)) {
      add_inputs(current, &pending);
    } else if (others != nullptr && others->count(current) == 0 && is_unshared(current)) {
      return true;
    }
  }
  return false;
}

}  // namespace

std::vector<char> kept_of(const std::vector<ValueObject*>& candidates) { return Network(candidates).kept(candidates); }

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
    if (value->was_saved == 0 && !is_leaf(value)) find_leaf(value, nullptr, &others);
  }
  std::vector<char> found;
  for (ValueObject* value : candidates) {
    ValueSet seen;
    found.push_back(find_leaf(value, &others, &seen));
  }
  return found;
}

}  // namespace actckpt::replay
