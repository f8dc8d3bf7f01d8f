// The dispatch handler of a recorder. Operators that only read their arguments and
// return new tensors are recorded here; all others by `record_special` in actckpt/_replay/recorder.py.
#include "record/record.h"

#include <cstdint>
#include <cstring>
#include <string>
#include <unordered_map>
#include <utility>

#include "core/meter.h"
#include "core/python.h"
#include "core/reads.h"
#include "graph/geometry.h"
#include "graph/window.h"
#include "record/callee.h"
#include "record/known_storages.h"
#include "record/module_calls.h"
#include "record/paused.h"
#include "record/unrecorded.h"

namespace actckpt::replay {
namespace {

// What is known of an overload, by its address: its hash is a Python function.
struct Known {
  py::object func;  // keeps the address taken
  const Callee* callee = nullptr;
  py::object op;
  py::object name;
  bool is_recorded = false;
  bool is_view = false;
  bool is_plain = false;
  bool is_plain_if_kept = false;
  bool makes_one = false;
  bool is_routed = false;
  Numerics which = Numerics::kAll;  // settings that it may depend on
};

const Known& known(PyObject* func) {
  static auto* found = new std::unordered_map<PyObject*, Known>();
  const auto at = found->find(func);
  if (at != found->end()) return at->second;
  Known entry;
  entry.func = py::reinterpret_borrow<py::object>(func);
  entry.op = call(names().describe, func);
  entry.name = attribute(entry.op.ptr(), names().name);
  entry.is_recorded = is_true(entry.op.ptr(), names().is_recorded);
  entry.callee = &callee_of(entry.op.ptr());
  entry.makes_one = is_true(entry.op.ptr(), names().makes_one);
  entry.is_routed = PyObject_IsTrue(attribute(entry.op.ptr(), names().routed_by).ptr()) == 1;
  if (entry.is_recorded) {
    entry.is_view = is_true(entry.op.ptr(), names().is_view);
    entry.is_plain = is_true(entry.op.ptr(), names().is_plain);
    entry.is_plain_if_kept = is_true(entry.op.ptr(), names().is_plain_if_kept);
    if (is_true(entry.op.ptr(), names().is_elementwise)) entry.which = Numerics::kOfElements;
  }
  return found->emplace(func, std::move(entry)).first->second;
}

// What is asked of a policy at every operator; read once for each that the tape gets.
const ChoiceFacts& facts_of_choice(TapeObject* tape) {
  ChoiceFacts& facts = tape->choice_facts;
  if (facts.are_known == 0) {
    PyObject* choice = tape->choice;
    facts.asks_calls = is_true(choice, names().asks_calls);
    facts.names_drop = is_true(choice, names().names_drop);
    assign(facts.actions, attribute(choice, names().actions).ptr());
    assign(facts.default_action, attribute(choice, names().default_action).ptr());
    facts.are_known = 1;
  }
  return facts;
}

py::object called(PyObject* func, PyObject* args, PyObject* kwargs) { return owned(PyObject_Call(func, args, kwargs)); }

// Notes an argument of which nobody tells when it changes: what is made from it must not be made again.
void note_untold(TapeObject* tape, PyObject* why) {
  tape->num_untold += 1;
  assign(tape->why_untold, why);
}

py::object with_windows(TapeObject* tape, PyObject* argument, PyObject* inputs) {
  if (PyObject_TypeCheck(argument, reinterpret_cast<PyTypeObject*>(names().tensor_type))) {
    Geometry geometry(argument);
    py::object value = value_of(tape, argument, geometry);
    if (!value) {
      note_untold(tape, names().why_unreadable);
      return py::reinterpret_borrow<py::object>(argument);
    }
    auto* read = reinterpret_cast<ValueObject*>(value.ptr());
    read->num_reads += 1;
    if (read->version < 0) note_untold(tape, names().why_inference);
    if (PyList_Append(inputs, value.ptr()) != 0) throw py::error_already_set();
    return window_of(argument, value.ptr(), &geometry);
  }
  if (PyList_CheckExact(argument) || PyTuple_CheckExact(argument)) {
    py::list items;
    for (const py::handle item : py::reinterpret_borrow<py::sequence>(argument)) {
      items.append(with_windows(tape, item.ptr(), inputs));
    }
    return std::move(items);
  }
  return py::reinterpret_borrow<py::object>(argument);
}

py::object args_with_windows(TapeObject* tape, PyObject* args, PyObject* inputs) {
  const Py_ssize_t size = PyTuple_GET_SIZE(args);
  py::object list = py::reinterpret_steal<py::object>(PyList_New(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyList_SET_ITEM(list.ptr(), i, with_windows(tape, PyTuple_GET_ITEM(args, i), inputs).release().ptr());
  }
  return list;
}

py::object kwargs_with_windows(TapeObject* tape, PyObject* kwargs, PyObject* inputs) {
  if (kwargs == nullptr || kwargs == Py_None || PyDict_GET_SIZE(kwargs) == 0) return py::none();
  py::dict copied;
  PyObject *name, *argument;
  Py_ssize_t position = 0;
  while (PyDict_Next(kwargs, &position, &name, &argument) != 0) {
    copied[name] = with_windows(tape, argument, inputs);
  }
  return std::move(copied);
}

// What stands for a dtype, the same in every process.
std::uint64_t dtype_id(PyObject* dtype) {
  static auto* found = new std::unordered_map<PyObject*, std::uint64_t>();
  const auto at = found->find(dtype);
  if (at != found->end()) return at->second;
  return found->emplace(Py_NewRef(dtype), id_of(std::string(py::str(py::handle(dtype))))).first->second;
}

// Advances the structure by a new tensor and names the place of its value.
void advance(TapeObject* tape, ValueObject* value, PyObject* op, const Geometry& geometry) {
  std::uint64_t hash = mixed(static_cast<std::uint64_t>(tape->structure), is_none(op) ? 0 : facts_of(op).id);
  hash = mixed(hash, static_cast<std::uint64_t>(geometry.num_dims()));
  for (int i = 0; i < geometry.num_dims(); ++i) hash = mixed(hash, static_cast<std::uint64_t>(geometry.sizes()[i]));
  hash = mixed(hash, dtype_id(geometry.dtype()));
  tape->structure = value->key = static_cast<long long>(hash);
}

// Whether a new value may be replayed as far as its place is concerned; most places were seen before.
bool needs_a_closer_look(TapeObject* tape, long long key) {
  const auto number = py::reinterpret_steal<py::object>(PyLong_FromLongLong(key));
  return PyDict_GetItem(tape->modules, number.ptr()) == nullptr || PySet_GET_SIZE(tape->opaque_places) > 0 ||
         PyTuple_GET_SIZE(tape->opaque_names) > 0;
}

// The action for one result of the operator that runs, None where the policy is no table of places.
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

// Notes the place of a value that the operator that runs has made.
void note_place(TapeObject* tape, ValueObject* value, PyObject* op, long kind, long index) {
  const RunningCall& made_in = running(tape->calls);
  assign(value->module, made_in.module);
  value->call = made_in.index;
  value->occurrence = made_in.occurrence;
  value->result = kind == 0 ? index : facts_of(op).num_returned + index;
}

// Whether an operator whose result stays may have to run again: a name that the result gets may say so.
bool may_be_dropped(TapeObject* tape) { return facts_of_choice(tape).names_drop != 0; }

// Notes how a new value comes about and what the policy wants with it.
void add_value(TapeObject* tape, ValueObject* value, StepObject* step, PyObject* op, long kind, long index,
               PyObject* tensor, Geometry* geometry, PyObject* action, PyObject* why_opaque) {
  assign(value->operator_, op);
  if (!is_none(op) && !is_none(tape->calls)) note_place(tape, value, op, kind, index);
  py::object found = py::reinterpret_borrow<py::object>(action);
  if (is_none(action) && value->module != nullptr) found = table_action(tape, op, value->result);
  action = found.ptr();
  assign(value->action, action);
  assign(value->choice, tape->choice);
  advance(tape, value, op, geometry->of(tensor));
  py::object why = py::reinterpret_borrow<py::object>(why_opaque);
  if (needs_a_closer_look(tape, value->key)) {
    const py::object never = owned(PyObject_CallMethodOneArg(reinterpret_cast<PyObject*>(tape), names().why_never,
                                                             reinterpret_cast<PyObject*>(value)));
    if (PyObject_IsTrue(why.ptr()) == 0) why = never;
  }
  assign(value->why_opaque, why.ptr());
  const bool stays = !is_none(action) && action != names().recompute;
  const bool is_opaque = PyObject_IsTrue(why.ptr()) == 1;
  if (step == nullptr || stays || is_opaque) {
    assign(value->held, tensor);
    value->index = index;
    append(tape->holding, reinterpret_cast<PyObject*>(value));
    if (!is_none(tape->meter)) note_alive(tape->meter, reads().untyped_storage(tensor).ptr());
    if (step == nullptr || is_opaque || !may_be_dropped(tape) || !is_true(op, names().is_plain)) return;
  }
  add_output(step, value, kind, index);
}

// Notes a tensor that a call returned; an alias of what is known already is nothing new (Rule 2 of NOTE [ Replay ]).
void add_result(TapeObject* tape, StepObject* step, PyObject* op, PyObject* tensor, long index, PyObject* action,
                PyObject* why_opaque) {
  Geometry geometry(tensor);
  const py::object storage = storage_of(tensor, geometry);
  if (!storage || known_storage_of(tape, storage.ptr()) != nullptr) return;
  tape->num_values += 1;
  const py::object made =
      new_value(reads().nbytes.number(storage.ptr()), reads().device(tensor).ptr(), tape->num_values);
  auto* value = reinterpret_cast<ValueObject*>(made.ptr());
  add_value(tape, value, step, op, 0, index, tensor, &geometry, action, why_opaque);
  look_at(value, tensor, root_of(tensor));
  add_known_storage(tape, storage.ptr(), made.ptr());
}

void add_results(TapeObject* tape, StepObject* step, PyObject* op, PyObject* result, PyObject* action,
                 PyObject* why_opaque, long& index) {
  if (PyObject_TypeCheck(result, reinterpret_cast<PyTypeObject*>(names().tensor_type))) {
    add_result(tape, step, op, result, index, action, why_opaque);
  } else if (PyList_Check(result) || PyTuple_Check(result)) {
    for (const py::handle item : py::reinterpret_borrow<py::sequence>(result)) {
      add_results(tape, step, op, item.ptr(), action, why_opaque, index);
    }
    return;
  }
  index += 1;
}

// The action for what an operator makes, None where results have their own.
py::object action_of(TapeObject* tape, const Known& entry) {
  const ChoiceFacts& facts = facts_of_choice(tape);
  if (is_none(facts.actions)) return entry.makes_one ? table_action(tape, entry.op.ptr(), 0) : py::none();
  PyObject* found = PyDict_GetItem(facts.actions, entry.name.ptr());
  return py::reinterpret_borrow<py::object>(found != nullptr ? found : facts.default_action);
}

py::object asked(PyObject* choice, PyObject* func, PyObject* args, PyObject* kwargs, PyObject* result) {
  return owned(PyObject_CallMethodObjArgs(choice, names().after_call, func, args, kwargs == nullptr ? Py_None : kwargs,
                                          result, nullptr));
}

// Whether what an operator makes stays, whatever the call: it is never made again.
bool stays_always(TapeObject* tape, const Known& entry) {
  if (facts_of_choice(tape).asks_calls != 0 || may_be_dropped(tape)) return false;
  const py::object action = action_of(tape, entry);
  return !action.is_none() && action.ptr() != names().recompute;
}

py::object record_plain(TapeObject* tape, const Known& entry, PyObject* args, PyObject* kwargs) {
  const py::object choice = py::reinterpret_borrow<py::object>(tape->choice);
  const bool asks_calls = facts_of_choice(tape).asks_calls != 0;
  py::object action = asks_calls ? py::none() : action_of(tape, entry);
  const bool stays = !action.is_none() && action.ptr() != names().recompute;
  const long long num_untold = tape->num_untold;
  py::object step;
  if (!stays || may_be_dropped(tape)) {  // else it is never made again: nobody will ask what it was made from
    const py::list inputs;
    py::object list = args_with_windows(tape, args, inputs.ptr());
    py::object dict = kwargs_with_windows(tape, kwargs, inputs.ptr());
    step = new_step(entry.op.ptr(), entry.which, std::move(list), std::move(dict), inputs);
  }
  py::object result = (*entry.callee)(args, kwargs);
  if (asks_calls) action = asked(choice.ptr(), entry.func.ptr(), args, kwargs, result.ptr());
  auto* raw = reinterpret_cast<StepObject*>(step.ptr());
  const py::object why = py::reinterpret_borrow<py::object>(tape->num_untold != num_untold ? tape->why_untold
                                                            : is_none(tape->why_opaque)    ? names().no_reason
                                                                                           : tape->why_opaque);
  long index = 0;
  add_results(tape, raw, entry.op.ptr(), result.ptr(), action.ptr(), why.ptr(), index);
  return result;
}

// Whether shapes are computed: such tensors have no bytes, and a DTensor computes with them on the side. To return
// NotImplemented would pass their mode by.
bool has_fakes(PyObject* types) {
  for (const py::handle type : py::reinterpret_borrow<py::sequence>(types)) {
    if (std::strcmp(reinterpret_cast<PyTypeObject*>(type.ptr())->tp_name, "FakeTensor") == 0) return true;
  }
  return false;
}

// Notes what a higher-order operator returned, which is not executed again: its arguments may be functions.
void add_unrecorded(TapeObject* tape, const Known& entry, PyObject* args, PyObject* kwargs, PyObject* result) {
  const bool asks_calls = facts_of_choice(tape).asks_calls != 0;
  const py::object action =
      asks_calls ? asked(tape->choice, entry.func.ptr(), args, kwargs, result) : action_of(tape, entry);
  long index = 0;
  add_results(tape, nullptr, entry.op.ptr(), result, action.ptr(), names().why_higher_order, index);
}

bool has_other_types(PyObject* types) {
  for (const py::handle type : py::reinterpret_borrow<py::sequence>(types)) {
    if (!is_tensor_type(type.ptr())) return true;
  }
  return false;
}

// Tells of subclasses among the arguments: they call operators on their inner tensors, and these are recorded (Rule 4
// of NOTE [ Replay ]).
void note_wrappers(PyObject* tape, PyObject* args, PyObject* kwargs) {
  for (PyObject* given : {args, kwargs}) {
    if (given == nullptr) continue;
    PyObject* noted[] = {tape, given};
    owned(PyObject_Vectorcall(names().note_wrappers, noted, 2, nullptr));
  }
}

// Runs an operator and records what it makes.
py::object recorded(TapeObject* tape, const Known& entry, PyObject* args, PyObject* kwargs) {
  PyObject* func = entry.func.ptr();
  if (!entry.is_recorded) {
    py::object result = called(func, args, kwargs);
    add_unrecorded(tape, entry, args, kwargs, result.ptr());
    return result;
  }
  if (entry.is_view) {
    py::object result = (*entry.callee)(args, kwargs);
    if (facts_of_choice(tape).asks_calls != 0) asked(tape->choice, func, args, kwargs, result.ptr());
    return result;
  }
  if (entry.is_plain || (entry.is_plain_if_kept && stays_always(tape, entry))) {
    return record_plain(tape, entry, args, kwargs);
  }
  PyObject* special[] = {reinterpret_cast<PyObject*>(tape), entry.op.ptr(), args, kwargs == nullptr ? Py_None : kwargs};
  return owned(PyObject_Vectorcall(names().record_special, special, 4, nullptr));
}

// dispatch(recorder, func, types, args, kwargs=None): a recorder's __torch_dispatch__.
PyObject* dispatch(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 4 && count != 5) throw py::type_error("__torch_dispatch__ takes 4 or 5 arguments");
    const py::object current = attribute(arguments[0], names().tape);
    auto* tape = reinterpret_cast<TapeObject*>(current.ptr());
    PyObject* func = arguments[1];
    PyObject* args = arguments[3];
    PyObject* kwargs = count == 4 || arguments[4] == Py_None ? nullptr : arguments[4];
    if (is_paused() || is_in_compiled_code()) return called(func, args, kwargs).release().ptr();
    if (PyObject_Size(arguments[2]) > 0 && has_other_types(arguments[2])) {
      if (has_fakes(arguments[2])) return called(func, args, kwargs).release().ptr();
      note_wrappers(current.ptr(), args, kwargs);
      Py_RETURN_NOTIMPLEMENTED;
    }
    const Known& entry = known(func);
    if (!is_none(tape->calls) && !entry.is_view) {
      note_operator(tape->calls, entry.op.ptr(), static_cast<std::uint64_t>(tape->structure));
    }
    if (entry.is_routed) {
      PyObject* call[] = {current.ptr(), entry.op.ptr(), args, kwargs == nullptr ? Py_None : kwargs};
      owned(PyObject_Vectorcall(names().hold_indices, call, 4, nullptr));
    }
    return recorded(tape, entry, args, kwargs).release().ptr();
  });
}

TapeObject* tape_of(const py::handle& tape) { return reinterpret_cast<TapeObject*>(tape.ptr()); }

}  // namespace

bool is_tensor_type(PyObject* type) { return is_plain_tensor_type(type) || type == names().fake_tensor_type; }

void append(PyObject* list, PyObject* item) {
  if (PyList_Append(list, item) != 0) throw py::error_already_set();
}

void add_record_functions(py::module_& module) {
  static PyMethodDef methods[] = {
      {"dispatch", fast(dispatch), METH_FASTCALL, "dispatch(recorder, func, types, args, kwargs=None)"},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
  // As an attribute of a class it binds like a Python function, without a frame of Python.
  const py::object dispatcher = module.attr("dispatch");
  module.add_object("torch_dispatch", py::reinterpret_steal<py::object>(PyInstanceMethod_New(dispatcher.ptr())));
  module.def("value_of", [](const py::handle& tape, const py::handle& tensor) -> py::object {
    py::object found = value_of(tape_of(tape), tensor.ptr(), Geometry(tensor.ptr()));
    return found ? found : py::none();
  });
  module.def("look_at", [](const py::handle& value, const py::handle& tensor) {
    look_at(reinterpret_cast<ValueObject*>(value.ptr()), tensor.ptr(), root_of(tensor.ptr()));
  });
  module.def("with_windows", [](const py::handle& tape, const py::handle& argument, const py::list& inputs) {
    return with_windows(tape_of(tape), argument.ptr(), inputs.ptr());
  });
  module.def("add_value",
             [](const py::handle& tape, const py::handle& value, const py::object& step, const py::handle& op,
                long index, const py::handle& tensor, const py::handle& action, const py::handle& why) {
               Geometry geometry(tensor.ptr());
               add_value(tape_of(tape), reinterpret_cast<ValueObject*>(value.ptr()),
                         step.is_none() ? nullptr : reinterpret_cast<StepObject*>(step.ptr()), op.ptr(), 1, index,
                         tensor.ptr(), &geometry, action.ptr(), why.ptr());
             });
  module.def("add_results", [](const py::handle& tape, const py::object& step, const py::handle& result,
                               const py::handle& action, const py::handle& why) {
    long index = 0;
    auto* raw = reinterpret_cast<StepObject*>(step.ptr());
    add_results(tape_of(tape), raw, raw->operator_, result.ptr(), action.ptr(), why.ptr(), index);
  });
}

}  // namespace actckpt::replay
