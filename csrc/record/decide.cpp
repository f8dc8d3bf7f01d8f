#include "record/decide.h"

#include <utility>

#include "core/python.h"
#include "graph/lineage.h"
#include "record/candidates.h"

namespace actckpt::replay {
namespace {

// What was done with a value, and why it differs from the policy.
struct Outcome {
  PyObject* action;
  py::object why;
};

bool is_opaque(const ValueObject* value) {
  return value->why_opaque != nullptr && PyObject_IsTrue(value->why_opaque) == 1;
}

py::object ask_tape(TapeObject* tape, PyObject* method, ValueObject* value) {
  return call_method_with(reinterpret_cast<PyObject*>(tape), method, as_object(value));
}

// Whether a value can be replayed.
bool can_replay(TapeObject* tape, ValueObject* value) {
  if (is_none(value->step) || is_opaque(value)) return false;
  return tape->num_lost == 0 || ask_tape(tape, names().is_obtainable, value).ptr() == Py_True;
}

// Keeps or offloads a value.
Outcome hold(TapeObject* tape, ValueObject* value, PyObject* tensor, PyObject* action) {
  assign(value->step, Py_None);
  py::object why = py::reinterpret_borrow<py::object>(names().no_reason);
  if (action != names().keep) {
    why = call_method_with(reinterpret_cast<PyObject*>(tape), names().move, as_object(value), tensor);
    if (!is_none(value->stored)) {
      return {PyObject_IsTrue(why.ptr()) == 1 ? names().keep : names().offload, std::move(why)};
    }
  }
  if (is_none(value->held)) append(tape->holding, as_object(value));
  // Hold the saved tensor itself: it counts later changes as autograd would. Aliases may count their own
  // (`Tensor.data`).
  if (value->is_parameter == 0) assign(value->held, tensor);
  return {names().keep, std::move(why)};
}

Outcome outcome_of(TapeObject* tape, ValueObject* value, PyObject* tensor) {
  py::object no_reason = py::reinterpret_borrow<py::object>(names().no_reason);
  if (value->action != names().recompute) return hold(tape, value, tensor, value->action);
  if (can_replay(tape, value)) {
    tape->recompute_bytes += value->nbytes;
    return {names().recompute, std::move(no_reason)};
  }
  py::object why = ask_tape(tape, names().note_opaque, value);
  return {hold(tape, value, tensor, names().keep).action, std::move(why)};
}

void note_outcome(EntryObject* entry, const ValueObject* value, const Outcome& outcome) {
  const bool stays_by_rule = value->is_input != 0 || value->why_opaque == names().why_routing;
  const bool has_reason = PyObject_IsTrue(outcome.why.ptr()) == 1;
  assign(entry->action, outcome.action);
  assign(entry->why, has_reason ? outcome.why.ptr() : stays_by_rule ? value->why_opaque : names().no_reason);
}

}  // namespace

void decide(TapeObject* tape, ValueObject* value, PyObject* tensor) {
  py::object entry;
  if (!is_none(tape->entries) && value->is_parameter == 0) {
    entry = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(add_entry(tape, value, tensor)));
  }
  if (is_none(value->action)) {
    PyObject* self = reinterpret_cast<PyObject*>(tape);
    assign(value->action, call_method_with(self, names().ask_policy, as_object(value), tensor).ptr());
  }
  const auto reference = py::reinterpret_steal<py::object>(untracked(PyWeakref_NewRef(as_object(value), nullptr)));
  append(tape->saved, reference.ptr());
  const Outcome outcome = outcome_of(tape, value, tensor);
  if (entry) note_outcome(reinterpret_cast<EntryObject*>(entry.ptr()), value, outcome);
  if (outcome.action != names().recompute) return;
  if (value->needs_collective == 0 && new_leaf_bytes(value, value->nbytes) > value->nbytes) {
    add_candidate(tape, value, tensor);
  } else {
    mark_needed(value);
  }
}

void add_decide_functions(py::module_& module) {
  module.def("decide", [](const py::handle& tape, const py::handle& value, const py::handle& tensor) {
    decide(as_tape(tape), as_value(value), tensor.ptr());
  });
  module.def("can_replay", [](const py::handle& tape, const py::handle& value) {
    return can_replay(as_tape(tape), as_value(value));
  });
  module.attr("WHY_INFERENCE") = py::reinterpret_borrow<py::object>(names().why_inference);
  module.attr("WHY_ROUTING") = py::reinterpret_borrow<py::object>(names().why_routing);
}

}  // namespace actckpt::replay
