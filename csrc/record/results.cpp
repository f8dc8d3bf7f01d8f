#include "record/results.h"

#include <cstdint>
#include <string>
#include <unordered_map>

#include "core/meter.h"
#include "core/python.h"
#include "core/reads.h"
#include "graph/geometry.h"
#include "record/choice.h"
#include "record/known_storages.h"
#include "record/module_calls.h"

namespace actckpt::replay {
namespace {

// A hash of a dtype, the same in every process.
std::uint64_t dtype_id(PyObject* dtype) {
  static auto* found = new std::unordered_map<PyObject*, std::uint64_t>();
  const auto at = found->find(dtype);
  if (at != found->end()) return at->second;
  return found->emplace(Py_NewRef(dtype), id_of(std::string(py::str(py::handle(dtype))))).first->second;
}

// Advances the structure by a new tensor, and sets the place of its value.
void advance(TapeObject* tape, ValueObject* value, PyObject* op, const Geometry& geometry) {
  std::uint64_t hash = mixed(static_cast<std::uint64_t>(tape->structure), is_none(op) ? 0 : facts_of(op).id);
  hash = mixed(hash, static_cast<std::uint64_t>(geometry.num_dims()));
  for (int i = 0; i < geometry.num_dims(); ++i) hash = mixed(hash, static_cast<std::uint64_t>(geometry.sizes()[i]));
  hash = mixed(hash, dtype_id(geometry.dtype()));
  tape->structure = value->key = static_cast<long long>(hash);
}

// Whether the place of a new value may forbid replay; most places were seen before.
bool needs_a_closer_look(TapeObject* tape, long long key) {
  const auto number = py::reinterpret_steal<py::object>(PyLong_FromLongLong(key));
  return PyDict_GetItem(tape->modules, number.ptr()) == nullptr || PySet_GET_SIZE(tape->opaque_places) > 0 ||
         PyTuple_GET_SIZE(tape->opaque_names) > 0;
}

// Sets the place of a value that the current operator made.
void note_place(TapeObject* tape, ValueObject* value, PyObject* op, long kind, long index) {
  const RunningCall& made_in = running(tape->calls);
  assign(value->module, made_in.module);
  value->call = made_in.index;
  value->occurrence = made_in.occurrence;
  value->result = kind == 0 ? index : facts_of(op).num_returned + index;
}

// Records how a new value is made and what the policy says about it.
void add_value(TapeObject* tape, ValueObject* value, StepObject* step, PyObject* op, long kind, long index,
               PyObject* tensor, Geometry* geometry, PyObject* action, PyObject* why_opaque) {
  assign(value->operator_, op);
  value->is_made = kind == 0 ? 1 : 0;
  if (!is_none(op) && !is_none(tape->calls)) note_place(tape, value, op, kind, index);
  py::object found = py::reinterpret_borrow<py::object>(action);
  if (is_none(action) && value->module != nullptr) found = table_action(tape, op, value->result);
  action = found.ptr();
  assign(value->action, action);
  assign(value->choice, tape->choice);
  advance(tape, value, op, geometry->of(tensor));
  py::object why = py::reinterpret_borrow<py::object>(why_opaque);
  if (needs_a_closer_look(tape, value->key)) {
    const py::object never =
        owned(PyObject_CallMethodOneArg(reinterpret_cast<PyObject*>(tape), names().why_never, as_object(value)));
    if (PyObject_IsTrue(why.ptr()) == 0) why = never;
  }
  assign(value->why_opaque, why.ptr());
  const bool stays = !is_none(action) && action != names().recompute;
  const bool is_opaque = PyObject_IsTrue(why.ptr()) == 1;
  if (step == nullptr || stays || is_opaque) {
    assign(value->held, tensor);
    value->index = index;
    append(tape->holding, as_object(value));
    tape->new_held_bytes += value->nbytes;
    if (!is_none(tape->meter)) note_alive(tape->meter, reads().untyped_storage(tensor).ptr());
    return;
  }
  add_output(step, value, kind, index);
}

// Records a result of a call; an alias of a known value is nothing new (NOTE [ Replay ], Rule 2).
void add_result(TapeObject* tape, StepObject* step, PyObject* op, PyObject* tensor, long index, PyObject* action,
                PyObject* why_opaque) {
  Geometry geometry(tensor);
  const py::object storage = storage_of(tensor, geometry);
  if (!storage || known_storage_of(tape, storage.ptr()) != nullptr) return;
  tape->num_values += 1;
  const py::object made =
      new_value(reads().nbytes.number(storage.ptr()), reads().device(tensor).ptr(), tape->num_values);
  auto* value = as_value(made);
  add_value(tape, value, step, op, 0, index, tensor, &geometry, action, why_opaque);
  record_version(value, tensor, root_of(tensor));
  add_known_storage(tape, storage.ptr(), made.ptr());
}

}  // namespace

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

void add_result_functions(py::module_& module) {
  module.def("add_value",
             [](const py::handle& tape, const py::handle& value, const py::object& step, const py::handle& op,
                long index, const py::handle& tensor, const py::handle& action, const py::handle& why) {
               Geometry geometry(tensor.ptr());
               add_value(as_tape(tape), as_value(value), step.is_none() ? nullptr : as_step(step), op.ptr(), 1, index,
                         tensor.ptr(), &geometry, action.ptr(), why.ptr());
             });
  module.def("add_results", [](const py::handle& tape, const py::object& step, const py::handle& result,
                               const py::handle& action, const py::handle& why) {
    long index = 0;
    add_results(as_tape(tape), as_step(step), as_step(step)->operator_, result.ptr(), action.ptr(), why.ptr(), index);
  });
}

}  // namespace actckpt::replay
