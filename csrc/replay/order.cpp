#include "replay/order.h"

#include <algorithm>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/python.h"
#include "graph/lineage.h"
#include "graph/needs.h"
#include "replay/depth_first.h"
#include "replay/execute.h"

namespace actckpt::replay {
namespace {

using Values = std::vector<py::object>;

// The steps between the values that are available and `target`, in the order of the forward.
std::vector<py::object> steps_of(ValueObject* target) {
  std::vector<std::pair<long long, py::object>> found;
  std::unordered_set<PyObject*> seen;
  std::vector<ValueObject*> pending = {target};
  while (!pending.empty()) {
    ValueObject* value = pending.back();
    pending.pop_back();
    if ((value != target && is_available(value)) || is_none(value->step) || !seen.insert(value->step).second) continue;
    found.emplace_back(value->ordinal, py::reinterpret_borrow<py::object>(value->step));
    add_inputs(value, &pending);
  }
  std::sort(found.begin(), found.end(), [](const auto& one, const auto& other) { return one.first < other.first; });
  std::vector<py::object> steps;
  steps.reserve(found.size());
  for (auto& [ordinal, step] : found) steps.push_back(std::move(step));
  return steps;
}

// What a step made and is alive.
Values outputs_of(const StepObject* step) {
  Values made;
  for (Py_ssize_t i = 0; step->outputs != nullptr && i < PyList_GET_SIZE(step->outputs); ++i) {
    PyObject* value = referent(PyList_GET_ITEM(step->outputs, i));
    if (value != nullptr) made.push_back(py::reinterpret_borrow<py::object>(value));
  }
  return made;
}

bool reads_one_of(const StepObject* step, const Values& values) {
  return std::any_of(values.begin(), values.end(), [&](const py::object& value) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(step->inputs); ++i) {
      if (PyList_GET_ITEM(step->inputs, i) == value.ptr()) return true;
    }
    return false;
  });
}

// Whether each step reads what the one before it made: then no other order is possible.
bool is_line(const std::vector<py::object>& steps, const std::vector<Values>& made) {
  for (std::size_t i = 1; i < steps.size(); ++i) {
    if (!reads_one_of(as_step(steps[i]), made[i - 1])) return false;
  }
  return true;
}

bool is_reading(const ValueObject* value, long long task) {
  return value->counted_task == task && value->is_reading != 0;
}

// What backward asks for too of what the steps make, or others than these steps read.
Values asked_again(const std::vector<py::object>& steps, const std::vector<Values>& made, long long task) {
  if (task == -1) return {};  // no backward: nothing is asked for again
  std::unordered_map<PyObject*, long long> reads_here;
  for (std::size_t i = 0; i < steps.size(); ++i) {
    PyObject* inputs = as_step(steps[i])->inputs;
    const auto times = std::count_if(made[i].begin(), made[i].end(),
                                     [&](const py::object& value) { return is_reading(as_value(value), task); });
    for (Py_ssize_t input = 0; input < PyList_GET_SIZE(inputs); ++input) {
      reads_here[PyList_GET_ITEM(inputs, input)] += times;
    }
  }
  Values again;
  for (const Values& values : made) {
    for (const py::object& owned : values) {
      ValueObject* value = as_value(owned);
      const bool has_other_readers = value->counted_task == task && value->num_readers > reads_here[owned.ptr()];
      if (is_pending(value, task) || has_other_readers) again.push_back(owned);
    }
  }
  return again;
}

// Whether so many bytes of what is asked for again may stay without a look at the window.
bool all_may_stay(const TapeObject* tape, const ValueObject* target, const Values& again) {
  if (tape->window_bytes >= 0) return false;
  long long nbytes = 0, num_values = 0;
  for (const py::object& value : again) {
    if (as_value(value) == target) continue;
    nbytes += as_value(value)->nbytes;
    ++num_values;
  }
  return tape->has_windows == 0 || nbytes <= PyLong_AsLongLong(names().small_window_bytes) || num_values < kFewValues;
}

// The steps as a graph, and the numbers of values in it, which are what `made` holds first.
OrderGraph graph_of(const std::vector<py::object>& steps, const std::vector<Values>& made, const Values& retained,
                    const ValueObject* target) {
  OrderGraph graph;
  std::unordered_map<const PyObject*, int> numbers;
  const auto number_of = [&](const PyObject* value, long long nbytes) {
    const auto [at, is_new] = numbers.emplace(value, static_cast<int>(numbers.size()));
    if (is_new) graph.nbytes.push_back(nbytes);
    return at->second;
  };
  for (const Values& values : made) {
    std::vector<int>& makes = graph.makes.emplace_back();
    for (const py::object& value : values) makes.push_back(number_of(value.ptr(), as_value(value)->nbytes));
  }
  for (const py::object& step : steps) {
    std::vector<int>& reads = graph.reads.emplace_back();
    PyObject* inputs = as_step(step)->inputs;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); ++i) {
      const int value = number_of(PyList_GET_ITEM(inputs, i), 0);
      if (std::find(reads.begin(), reads.end(), value) == reads.end()) reads.push_back(value);
    }
  }
  graph.is_retained.assign(graph.nbytes.size(), 0);
  for (const py::object& value : retained) graph.is_retained[number_of(value.ptr(), 0)] = 1;
  graph.target = number_of(reinterpret_cast<const PyObject*>(target), 0);
  return graph;
}

// Brings the steps into the order of NOTE [ Order ].
void sort_steps(Plan* plan, const std::vector<Values>& made, const ValueObject* target) {
  std::vector<py::object> steps;
  for (const int step : default_order(graph_of(plan->steps, made, plan->retained, target))) {
    steps.push_back(std::move(plan->steps[static_cast<std::size_t>(step)]));
  }
  plan->steps = std::move(steps);
}

Plan chosen_in_python(TapeObject* tape, ValueObject* target, long long task, long long clock) {
  const py::object answer = call_with(names().replay_order, reinterpret_cast<PyObject*>(tape),
                                      reinterpret_cast<PyObject*>(target), number(task).ptr(), number(clock).ptr());
  Plan plan;
  const auto both = answer.cast<py::tuple>();
  for (const py::handle step : both[0]) plan.steps.push_back(py::reinterpret_borrow<py::object>(step));
  for (const py::handle value : both[1]) plan.retained.push_back(py::reinterpret_borrow<py::object>(value));
  return plan;
}

}  // namespace

Plan plan_of(TapeObject* tape, ValueObject* target, long long task, long long clock) {
  Plan plan;
  plan.steps = steps_of(target);
  std::vector<Values> made;
  for (const py::object& step : plan.steps) made.push_back(outputs_of(as_step(step)));
  if (plan.steps.size() == 1) {
    for (py::object& value : made[0]) {
      if (has_room(tape) && is_asked(as_value(value), task)) plan.retained.push_back(std::move(value));
    }
    return plan;
  }
  if (is_none(tape->replay_order)) {
    plan.retained = asked_again(plan.steps, made, task);
    if (all_may_stay(tape, target, plan.retained)) {
      if (!is_line(plan.steps, made)) sort_steps(&plan, made, target);
      return plan;
    }
  }
  return chosen_in_python(tape, target, task, clock);
}

}  // namespace actckpt::replay
