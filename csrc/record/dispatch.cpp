#include "record/dispatch.h"

#include <cstdint>
#include <cstring>
#include <utility>

#include "core/python.h"
#include "record/arguments.h"
#include "record/callee.h"
#include "record/candidates.h"
#include "record/choice.h"
#include "record/module_calls.h"
#include "record/overload.h"
#include "record/paused.h"
#include "record/results.h"
#include "record/unrecorded.h"

namespace actckpt::replay {
namespace {

py::object called(PyObject* func, PyObject* args, PyObject* kwargs) { return owned(PyObject_Call(func, args, kwargs)); }

py::object record_plain(TapeObject* tape, const Overload& overload, PyObject* args, PyObject* kwargs) {
  const py::object choice = py::reinterpret_borrow<py::object>(tape->choice);
  const bool asks_calls = facts_of_choice(tape).asks_calls != 0;
  py::object action = asks_calls ? py::none() : action_of(tape, overload);
  const bool stays = !action.is_none() && action.ptr() != names().recompute;
  const long long num_unversioned_args = tape->num_unversioned_args;
  py::object step;
  if (!stays) {  // else it is never replayed: its inputs do not matter
    const py::list inputs;
    py::object list = args_with_windows(tape, args, inputs.ptr());
    py::object dict = kwargs_with_windows(tape, kwargs, inputs.ptr());
    step = new_step(overload.op.ptr(), overload.which, std::move(list), std::move(dict), inputs);
  }
  py::object result = (*overload.callee)(args, kwargs);
  if (asks_calls) action = asked_after_call(choice.ptr(), overload.func.ptr(), args, kwargs, result.ptr());
  auto* raw = as_step(step);
  const py::object why =
      py::reinterpret_borrow<py::object>(tape->num_unversioned_args != num_unversioned_args ? tape->why_unversioned
                                         : is_none(tape->why_opaque)                        ? names().no_reason
                                                                                            : tape->why_opaque);
  long index = 0;
  add_results(tape, raw, overload.op.ptr(), result.ptr(), action.ptr(), why.ptr(), index);
  return result;
}

// Whether this call only computes shapes: fake tensors have no bytes, and a DTensor computes with them internally.
// Returning NotImplemented would bypass their mode.
bool has_fakes(PyObject* types) {
  for (const py::handle type : py::reinterpret_borrow<py::sequence>(types)) {
    if (std::strcmp(reinterpret_cast<PyTypeObject*>(type.ptr())->tp_name, "FakeTensor") == 0) return true;
  }
  return false;
}

// Records the results of a higher-order operator. It is never replayed: its arguments may be functions.
void add_unrecorded(TapeObject* tape, const Overload& overload, PyObject* args, PyObject* kwargs, PyObject* result) {
  const bool asks_calls = facts_of_choice(tape).asks_calls != 0;
  const py::object action = asks_calls ? asked_after_call(tape->choice, overload.func.ptr(), args, kwargs, result)
                                       : action_of(tape, overload);
  long index = 0;
  add_results(tape, nullptr, overload.op.ptr(), result, action.ptr(), names().why_higher_order, index);
}

bool has_other_types(PyObject* types) {
  for (const py::handle type : py::reinterpret_borrow<py::sequence>(types)) {
    if (!is_tensor_type(type.ptr())) return true;
  }
  return false;
}

// Records the subclass instances among the arguments. They call operators on their inner tensors, which are recorded
// (NOTE [ Replay ], Rule 4).
void note_wrappers(PyObject* tape, PyObject* args, PyObject* kwargs) {
  for (PyObject* given : {args, kwargs}) {
    if (given == nullptr) continue;
    PyObject* noted[] = {tape, given};
    owned(PyObject_Vectorcall(names().note_wrappers, noted, 2, nullptr));
  }
}

// Runs an operator and records its results.
py::object recorded(TapeObject* tape, const Overload& overload, PyObject* args, PyObject* kwargs) {
  PyObject* func = overload.func.ptr();
  if (!overload.is_recorded) {
    py::object result = called(func, args, kwargs);
    add_unrecorded(tape, overload, args, kwargs, result.ptr());
    return result;
  }
  if (overload.is_view) {
    py::object result = (*overload.callee)(args, kwargs);
    if (facts_of_choice(tape).asks_calls != 0) asked_after_call(tape->choice, func, args, kwargs, result.ptr());
    return result;
  }
  if (overload.is_plain || (overload.is_plain_if_kept && stays_always(tape, overload))) {
    return record_plain(tape, overload, args, kwargs);
  }
  const py::object action = facts_of_choice(tape).asks_calls != 0 ? py::none() : action_of(tape, overload);
  PyObject* special[] = {reinterpret_cast<PyObject*>(tape), overload.op.ptr(), args,
                         kwargs == nullptr ? Py_None : kwargs, action.ptr()};
  return owned(PyObject_Vectorcall(names().record_special, special, 5, nullptr));
}

// dispatch(recorder, func, types, args, kwargs=None): a recorder's __torch_dispatch__.
PyObject* dispatch(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 4 && count != 5) throw py::type_error("__torch_dispatch__ takes 4 or 5 arguments");
    const py::object current = attribute(arguments[0], names().tape);
    auto* tape = as_tape(current);
    PyObject* func = arguments[1];
    PyObject* args = arguments[3];
    PyObject* kwargs = count == 4 || arguments[4] == Py_None ? nullptr : arguments[4];
    if (is_paused() || is_in_compiled_code()) return called(func, args, kwargs).release().ptr();
    if (PyObject_Size(arguments[2]) > 0 && has_other_types(arguments[2])) {
      if (has_fakes(arguments[2])) return called(func, args, kwargs).release().ptr();
      note_wrappers(current.ptr(), args, kwargs);
      Py_RETURN_NOTIMPLEMENTED;
    }
    release_unused(tape);
    const Overload& overload = overload_of(func);
    if (!is_none(tape->calls) && !overload.is_view) {
      note_operator(tape->calls, overload.op.ptr(), static_cast<std::uint64_t>(tape->structure));
    }
    if (overload.is_routed) {
      PyObject* call[] = {current.ptr(), overload.op.ptr(), args, kwargs == nullptr ? Py_None : kwargs};
      owned(PyObject_Vectorcall(names().hold_indices, call, 4, nullptr));
    }
    return recorded(tape, overload, args, kwargs).release().ptr();
  });
}

}  // namespace

void add_dispatch_functions(py::module_& module) {
  static PyMethodDef methods[] = {
      {"dispatch", fast(dispatch), METH_FASTCALL, "dispatch(recorder, func, types, args, kwargs=None)"},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
  // As a class attribute it binds like a Python function, without a Python frame.
  const py::object dispatcher = module.attr("dispatch");
  module.add_object("torch_dispatch", py::reinterpret_steal<py::object>(PyInstanceMethod_New(dispatcher.ptr())));
}

}  // namespace actckpt::replay
