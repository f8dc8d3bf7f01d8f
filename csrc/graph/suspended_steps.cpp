#include "graph/suspended_steps.h"

#include <functional>
#include <utility>
#include <vector>

#include "core/python.h"
#include "graph/window.h"

namespace actckpt::replay {
namespace {

using Replaced = std::function<py::object(PyObject*)>;  // a value -> its replacement

// An argument of a step, with its values replaced.
py::object with_other_values(PyObject* argument, const Replaced& replaced) {
  if (Py_TYPE(argument) == window_type) {
    const auto* window = reinterpret_cast<WindowObject*>(argument);
    return window_on(window, replaced(window->value).ptr());
  }
  if (PyDict_CheckExact(argument)) {
    py::dict copied;
    for (const auto& item : py::reinterpret_borrow<py::dict>(argument)) {
      copied[item.first] = with_other_values(item.second.ptr(), replaced);
    }
    return std::move(copied);
  }
  if (!PyList_CheckExact(argument)) return py::reinterpret_borrow<py::object>(argument);
  py::list copied(PyList_GET_SIZE(argument));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(argument); ++i) {
    PyList_SET_ITEM(copied.ptr(), i, with_other_values(PyList_GET_ITEM(argument, i), replaced).release().ptr());
  }
  untracked(copied.ptr());
  return std::move(copied);
}

// A list of values.
PyObject* replaced_values(PyObject* values, const Replaced& replaced) {
  if (values == nullptr) return nullptr;
  py::list copied(PyList_GET_SIZE(values));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(values); ++i) {
    PyList_SET_ITEM(copied.ptr(), i, replaced(PyList_GET_ITEM(values, i)).release().ptr());
  }
  return untracked(copied.release().ptr());
}

// It shares the list of results with `step`.
py::object copy_of_step(const StepObject* step, const Replaced& replaced) {
  auto* copied = allocated<StepObject>(step_type);
  auto owner = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(copied));
  assign(copied->operator_, step->operator_);
  assign(copied->outputs, step->outputs);
  assign(copied->random, step->random);
  assign(copied->numerics, step->numerics);
  copied->grad_enabled = step->grad_enabled;
  if (step->results != nullptr) copied->results = new std::vector<std::pair<long, long>>(*step->results);
  copied->args = with_other_values(step->args, replaced).release().ptr();
  if (step->kwargs != nullptr) copied->kwargs = with_other_values(step->kwargs, replaced).release().ptr();
  copied->inputs = replaced_values(step->inputs, replaced);
  copied->written = replaced_values(step->written, replaced);
  return owner;
}

bool contains(PyObject* list, const PyObject* object) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    if (PyList_GET_ITEM(list, i) == object) return true;
  }
  return false;
}

// The step from which `suspended` was copied, or another copy of it, if another of its results still has it.
PyObject* step_of_others(const StepObject* suspended) {
  if (suspended->outputs == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(suspended->outputs); ++i) {
    const auto* other = reinterpret_cast<ValueObject*>(referent(PyList_GET_ITEM(suspended->outputs, i)));
    if (other == nullptr || is_none(other->step)) continue;
    if (reinterpret_cast<StepObject*>(other->step)->outputs == suspended->outputs) return other->step;
  }
  return nullptr;
}

}  // namespace

void park_step(ValueObject* value) {
  const auto* step = reinterpret_cast<StepObject*>(value->step);
  // Other values in its arguments are placeholders, which nobody else holds.
  const py::object suspended = copy_of_step(step, [&](PyObject* named) {
    if (!contains(step->inputs, named)) return py::reinterpret_borrow<py::object>(named);
    PyObject* reference = untracked(PyWeakref_NewRef(named, nullptr));
    if (reference == nullptr) throw_pending();
    return py::reinterpret_steal<py::object>(reference);
  });
  assign(value->suspended, suspended.ptr());
  assign(value->step, nullptr);
}

bool restore_step(ValueObject* value) {
  if (value->suspended == nullptr) return false;
  const auto owner = py::reinterpret_steal<py::object>(std::exchange(value->suspended, nullptr));
  const auto* suspended = as_step(owner);
  if (PyObject* step = step_of_others(suspended)) {
    assign(value->step, step);
    return true;
  }
  std::vector<py::object> alive;  // held until the step holds them
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(suspended->inputs); ++i) {
    PyObject* input = referent(PyList_GET_ITEM(suspended->inputs, i));
    if (input == nullptr) return false;
    alive.push_back(py::reinterpret_borrow<py::object>(input));
  }
  const py::object step = copy_of_step(suspended, [](PyObject* named) {
    return py::reinterpret_borrow<py::object>(PyWeakref_Check(named) ? referent(named) : named);
  });
  assign(value->step, step.ptr());
  return true;
}

}  // namespace actckpt::replay
