#include "record/choice.h"

#include "record/module_calls.h"

namespace actckpt::replay {

const ChoiceFacts& facts_of_choice(TapeObject* tape) {
  ChoiceFacts& facts = tape->choice_facts;
  if (facts.are_known == 0) {
    PyObject* choice = tape->choice;
    facts.asks_calls = is_true(choice, names().asks_calls);
    assign(facts.actions, attribute(choice, names().actions).ptr());
    assign(facts.default_action, attribute(choice, names().default_action).ptr());
    facts.are_known = 1;
  }
  return facts;
}

py::object table_action(TapeObject* tape, PyObject* op, long long result) {
  const py::object found = attribute(tape->choice, names().found);
  if (found.is_none()) return py::none();
  const OperatorFacts& facts = facts_of(op);
  const RunningCall& made_in = running(tape->calls);
  const py::object key = number(static_cast<long long>(place_id(made_in, facts, result)));
  PyObject* known = PyDict_GetItem(found.ptr(), key.ptr());
  if (known != nullptr) return py::reinterpret_borrow<py::object>(known);
  return call_method_with(tape->choice, names().find, key.ptr(), made_in.module, attribute(op, names().name).ptr(),
                          number(made_in.occurrence).ptr(), number(result).ptr(), number(made_in.index).ptr());
}

py::object action_of(TapeObject* tape, const Overload& overload) {
  const ChoiceFacts& facts = facts_of_choice(tape);
  if (is_none(facts.actions)) return overload.makes_one ? table_action(tape, overload.op.ptr(), 0) : py::none();
  PyObject* found = PyDict_GetItem(facts.actions, overload.name.ptr());
  return py::reinterpret_borrow<py::object>(found != nullptr ? found : facts.default_action);
}

bool stays_always(TapeObject* tape, const Overload& overload) {
  if (facts_of_choice(tape).asks_calls != 0) return false;
  const py::object action = action_of(tape, overload);
  return !action.is_none() && action.ptr() != names().recompute;
}

py::object asked_after_call(PyObject* choice, PyObject* func, PyObject* args, PyObject* kwargs, PyObject* result) {
  return owned(PyObject_CallMethodObjArgs(choice, names().after_call, func, args, kwargs == nullptr ? Py_None : kwargs,
                                          result, nullptr));
}

}  // namespace actckpt::replay
