#include "record/known_storages.h"

#include <utility>

#include "core/python.h"
#include "core/reads.h"
#include "offload/owned_memory.h"
#include "record/unrecorded.h"
#include "rerun/held.h"

namespace actckpt::replay {
namespace {

py::object key_of(PyObject* storage) { return py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(storage)); }

// Parameters, and other leaves that outer hooks do not get (Rule 7 of NOTE [ Outer hooks ]). A tensor that such hooks
// return to a rerun is a leaf there; it counts as a parameter only if it was one in the forward.
bool is_parameter(const TapeObject* tape, PyObject* root, PyObject* storage) {
  if (!reads().is_leaf.is_true(root)) return false;
  if (is_instance(root, names().parameter_type)) return true;
  if (is_none(tape->outer)) return reads().requires_grad.is_true(root);
  if (PyObject_HasAttrString(root, kParameterMark) != 0) return true;
  return !is_none(tape->argument_storages) && reads().requires_grad.is_true(root) &&
         PySet_Contains(tape->argument_storages, key_of(storage).ptr()) == 0;
}

// Takes an unknown storage as an input of the region.
py::object take_input(TapeObject* tape, PyObject* tensor, const py::object& storage) {
  tape->num_values += 1;
  py::object made = new_value(reads().nbytes.number(storage.ptr()), reads().device(tensor).ptr(), tape->num_values);
  auto* value = as_value(made);
  value->is_input = 1;
  assign(value->why_opaque, names().why_input);
  py::object root = root_of(tensor);
  if (root.ptr() != tensor && storage_of(root.ptr(), Geometry(root.ptr())).ptr() != storage.ptr()) {
    root = py::reinterpret_borrow<py::object>(tensor);
  }
  value->is_parameter = is_parameter(tape, root.ptr(), storage.ptr());
  assign(value->held, root.ptr());
  record_version(value, root.ptr(), root_of(root.ptr()));
  assign(value->choice, tape->choice);
  const py::object least = attribute(tape->choice, names().offloads_inputs_from);
  // With outer hooks, offloading is up to them: they get what the region holds.
  if (is_none(tape->outer) && value->is_parameter == 0 && !least.is_none() &&
      value->nbytes >= PyLong_AsLongLong(least.ptr()) && !is_known_owned(storage.ptr())) {
    assign(value->action, names().offload);
  } else {
    assign(value->action, attribute(tape->choice, names().for_value).is_none() ? names().keep : Py_None);
  }
  add_known_storage(tape, storage.ptr(), made.ptr());
  append(tape->holding, made.ptr());
  record_maker_version(tape, value, root.ptr());
  return made;
}

}  // namespace

KnownStorageObject* known_storage_of(TapeObject* tape, PyObject* storage) {
  PyObject* found = PyDict_GetItem(tape->storages, key_of(storage).ptr());
  if (found == nullptr) return nullptr;
  auto* known = reinterpret_cast<KnownStorageObject*>(found);
  return referent(known->storage) == storage ? known : nullptr;
}

void record_version(ValueObject* value, PyObject* tensor, const py::object& root) {
  if (!read_version(tensor, &value->version)) return;
  PyObject* reference = untracked(PyWeakref_NewRef(root.ptr(), nullptr));
  if (reference == nullptr) throw py::error_already_set();
  Py_XDECREF(std::exchange(value->root, reference));
}

void add_known_storage(TapeObject* tape, PyObject* storage, PyObject* value) {
  const py::object known = new_known_storage(storage, value);
  if (PyDict_SetItem(tape->storages, key_of(storage).ptr(), known.ptr()) != 0) throw py::error_already_set();
}

py::object storage_of(PyObject* tensor, const Geometry& geometry) {
  return geometry.is_known() ? actckpt::storage_of(tensor) : strided_storage_of(tensor);
}

void note_unpacked(TapeObject* tape, PyObject* tensor, PyObject* value) {
  const py::object storage = reads().untyped_storage(tensor);
  if (known_storage_of(tape, storage.ptr()) == nullptr) add_known_storage(tape, storage.ptr(), value);
}

py::object value_of(TapeObject* tape, PyObject* tensor, const Geometry& geometry) {
  const py::object storage = storage_of(tensor, geometry);
  if (!storage) return py::object();
  KnownStorageObject* holder = known_storage_of(tape, storage.ptr());
  PyObject* self = reinterpret_cast<PyObject*>(tape);
  if (holder == nullptr) {
    return take_input(tape, tensor, storage);
  }
  py::object found = py::reinterpret_borrow<py::object>(holder->value);
  auto* value = as_value(found);
  PyObject* seen = value->root == nullptr ? nullptr : referent(value->root);
  // A tensor that was its own base is not a view, and never becomes one.
  const py::object root = seen == tensor ? py::reinterpret_borrow<py::object>(tensor) : root_of(tensor);
  PyObject* last = value->version < 0 ? nullptr : seen;
  if (last == nullptr) {
    record_version(value, tensor, root);
  } else if (last != root.ptr() || version_of(tensor) > value->version) {
    PyObject* name = last != root.ptr() ? names().another_version_alias : names().changed_unseen;
    return owned(PyObject_CallMethodObjArgs(self, name, tensor, reinterpret_cast<PyObject*>(holder), nullptr));
  }
  return found;
}

void add_known_storage_functions(py::module_& module) {
  module.def("value_of", [](const py::handle& tape, const py::handle& tensor) -> py::object {
    py::object found = value_of(as_tape(tape), tensor.ptr(), Geometry(tensor.ptr()));
    return found ? found : py::none();
  });
  module.def("record_version", [](const py::handle& value, const py::handle& tensor) {
    record_version(as_value(value), tensor.ptr(), root_of(tensor.ptr()));
  });
}

}  // namespace actckpt::replay
