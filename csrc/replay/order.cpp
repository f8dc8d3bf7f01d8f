#include "replay/order.h"

#include <pybind11/stl.h>

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

// The steps between the available values and `target`, in forward order.
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

// The live results of a step.
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

// Whether each step reads a result of the previous one: then no other order is possible.
bool is_line(const std::vector<py::object>& steps, const std::vector<Values>& made) {
  for (std::size_t i = 1; i < steps.size(); ++i) {
    if (!reads_one_of(as_step(steps[i]), made[i - 1])) return false;
  }
  return true;
}

bool is_reading(const ValueObject* value, long long task) {
  return value->counted_task == task && value->is_reading != 0;
}

// Results of the steps that backward needs too, or that other steps read.
Values asked_again(const std::vector<py::object>& steps, const std::vector<Values>& made, long long task) {
  if (task == -1) return {};  // no backward: nothing is needed again
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

// Whether everything that is needed again may stay; otherwise a window limits it (NOTE [ Windows ]).
bool all_may_stay(const TapeObject* tape, const ValueObject* target, const Values& again) {
  if (tape->has_windows == 0) return true;
  long long nbytes = 0, num_values = 0;
  for (const py::object& value : again) {
    if (as_value(value) == target) continue;
    nbytes += as_value(value)->nbytes;
    ++num_values;
  }
  if (tape->window_bytes >= 0) {
    return nbytes == 0 || nbytes + (tape->cached == nullptr ? 0 : tape->cached->bytes) <= tape->window_bytes;
  }
  return nbytes <= PyLong_AsLongLong(names().small_window_bytes) || num_values < kFewValues;
}

// The steps as a graph. Values are numbered; the first numbers are those in `made`.
struct Numbered {
  OrderGraph graph;
  std::vector<PyObject*> values;
  std::unordered_map<const PyObject*, int> numbers;

  int number_of(PyObject* value, long long nbytes) {
    const auto [at, is_new] = numbers.emplace(value, static_cast<int>(values.size()));
    if (is_new) {
      values.push_back(value);
      graph.nbytes.push_back(nbytes);
    }
    return at->second;
  }
};

Numbered numbered(const std::vector<py::object>& steps, const std::vector<Values>& made, const Values& retained,
                  ValueObject* target) {
  Numbered found;
  for (const Values& values : made) {
    std::vector<int>& makes = found.graph.makes.emplace_back();
    for (const py::object& value : values) makes.push_back(found.number_of(value.ptr(), as_value(value)->nbytes));
  }
  for (const py::object& step : steps) {
    std::vector<int>& reads = found.graph.reads.emplace_back();
    PyObject* inputs = as_step(step)->inputs;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); ++i) {
      const int value = found.number_of(PyList_GET_ITEM(inputs, i), 0);
      if (std::find(reads.begin(), reads.end(), value) == reads.end()) reads.push_back(value);
    }
  }
  found.graph.is_retained.assign(found.values.size(), 0);
  for (const py::object& value : retained) found.graph.is_retained[found.number_of(value.ptr(), 0)] = 1;
  found.graph.target = found.number_of(as_object(target), 0);
  return found;
}

std::vector<py::object> in_order(const std::vector<py::object>& steps, const std::vector<int>& order) {
  std::vector<py::object> sorted;
  for (const int step : order) sorted.push_back(steps.at(static_cast<std::size_t>(step)));
  return sorted;
}

// The fields of a `ReplayGraph`.
py::tuple fields_of(const Numbered& found, const std::vector<py::object>& steps, const std::vector<Values>& made,
                    long long task) {
  py::list operators;
  for (const py::object& step : steps) operators.append(attribute(as_step(step)->operator_, names().name));
  std::vector<long long> ordinals;
  std::vector<int> retained, again;
  for (const Values& values : made) {
    ordinals.push_back(as_value(values.back())->ordinal);
    for (const py::object& value : values) {
      const int number = found.numbers.at(value.ptr());
      if (is_asked(as_value(value), task)) again.push_back(number);
      if (found.graph.is_retained[number] != 0) retained.push_back(number);
    }
  }
  py::dict until;
  for (const int number : retained) {
    const long long last_use = reinterpret_cast<ValueObject*>(found.values[number])->last_use;
    until[py::int_(number)] = std::lower_bound(ordinals.begin(), ordinals.end(), last_use) - ordinals.begin();
  }
  return py::make_tuple(operators, found.graph.reads, found.graph.makes, found.graph.nbytes, found.graph.target,
                        retained, again, until);
}

// The built-in order, or that of `configure(replay_order=...)`, and which results stay.
void choose(Plan* plan, TapeObject* tape, const std::vector<Values>& made, ValueObject* target, long long task,
            long long clock) {
  const bool all_stay = all_may_stay(tape, target, plan->retained);
  const bool is_plugged = !is_none(tape->replay_order);
  if (all_stay && !is_plugged && is_line(plan->steps, made)) return;
  const Numbered found = numbered(plan->steps, made, plan->retained, target);
  std::vector<int> order = is_plugged ? std::vector<int>() : default_order(found.graph);
  if (is_plugged || !all_stay) {
    const auto answer = py::reinterpret_borrow<py::function>(names().choose_replay)(
        py::handle(reinterpret_cast<PyObject*>(tape)), fields_of(found, plan->steps, made, task), order, all_stay, task,
        clock);
    order = answer.cast<py::tuple>()[0].cast<std::vector<int>>();
    plan->retained.clear();
    for (const py::handle number : answer.cast<py::tuple>()[1]) {
      plan->retained.push_back(py::reinterpret_borrow<py::object>(found.values.at(number.cast<std::size_t>())));
    }
  }
  plan->steps = in_order(plan->steps, order);
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
  plan.retained = asked_again(plan.steps, made, task);
  choose(&plan, tape, made, target, task, clock);
  return plan;
}

}  // namespace actckpt::replay
