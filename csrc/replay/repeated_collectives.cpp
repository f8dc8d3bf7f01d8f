#include "replay/repeated_collectives.h"

#include <algorithm>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/python.h"
#include "graph/lineage.h"
#include "replay/execute.h"

namespace actckpt::replay {
namespace {

// Allows collectives of a tape to run for its lifetime.
class RepeatScope {
 public:
  explicit RepeatScope(TapeObject* tape) noexcept : tape_(tape) { tape_->is_repeating = 1; }
  RepeatScope(const RepeatScope&) = delete;
  RepeatScope& operator=(const RepeatScope&) = delete;
  ~RepeatScope() noexcept { tape_->is_repeating = 0; }

 private:
  TapeObject* tape_;
};

// Collectives that `value` depends on and whose results are missing, in forward order. Cached results of other
// operators count as missing, since they may be released. Each value is visited once per backward.
std::vector<py::object> missing_collectives(ValueObject* value, long long task) {
  std::vector<std::pair<long long, py::object>> found;
  std::unordered_set<const ValueObject*> seen;
  std::vector<ValueObject*> pending = {value};
  while (!pending.empty()) {
    ValueObject* current = pending.back();
    pending.pop_back();
    if (current->needs_collective == 0 || is_none(current->step)) continue;
    if (!is_none(current->held) || !is_none(current->stored)) continue;
    if ((task != -1 && current->repeated_task == task) || !seen.insert(current).second) continue;
    if (task != -1) current->repeated_task = task;
    if (current->is_repeated != 0 && is_none(current->cached)) {
      found.emplace_back(current->ordinal, py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(current)));
    }
    add_inputs(current, &pending);
  }
  std::sort(found.begin(), found.end(), [](const auto& one, const auto& other) { return one.first < other.first; });
  std::vector<py::object> values;
  for (auto& [ordinal, owned] : found) values.push_back(std::move(owned));
  return values;
}

}  // namespace

void repeat_collectives(TapeObject* tape, ValueObject* value) {
  if (value->needs_collective == 0 || tape->is_repeating != 0) return;
  const long long task = current_task();
  const std::vector<py::object> missing = missing_collectives(value, task);
  if (missing.empty()) return;
  if (task == -1) raise(call_with(names().order_error, missing[0].ptr()));
  const RepeatScope scope(tape);
  for (const py::object& each : missing) {
    auto* made = as_value(each);
    bytes_of(tape, made, nullptr, made->ordinal, nullptr);
  }
}

void check_is_in_turn(const TapeObject* tape, const StepObject* step) {
  if (tape->is_repeating != 0 || tape->repeats == 0) return;
  for (Py_ssize_t i = 0; step->outputs != nullptr && i < PyList_GET_SIZE(step->outputs); ++i) {
    PyObject* made = referent(PyList_GET_ITEM(step->outputs, i));
    if (made != nullptr && reinterpret_cast<ValueObject*>(made)->is_repeated != 0) {
      raise(call_with(names().order_error, made));
    }
  }
}

}  // namespace actckpt::replay
