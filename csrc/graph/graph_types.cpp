// The Python types of a region's graph: values, steps, storages, windows.
#include "graph/python_types.h"

#include "core/python.h"
#include "graph/geometry.h"
#include "graph/lineage.h"
#include "graph/needs.h"
#include "graph/window.h"

#include <cstddef>
#include <utility>
#include <vector>

namespace actckpt::replay {

PyTypeObject* value_type = nullptr;
PyTypeObject* step_type = nullptr;
PyTypeObject* known_storage_type = nullptr;
PyTypeObject* window_type = nullptr;

namespace {

void value_dealloc(PyObject* self) {
  auto* value = reinterpret_cast<ValueObject*>(self);
  if (!is_none(value->cached)) unlist_cached(value);  // first: weakref callbacks may read the list
  if (value->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  for (HandleObject* handle : value->handles) {
    if (handle != nullptr) handle->listed_on = nullptr;
  }
  PyMem_Free(value->handles.many);
  release(value->cached_in);
  using V = ValueObject;
  free_object<V>(self, &V::device, &V::operator_, &V::action, &V::choice, &V::held, &V::root, &V::stored, &V::cached,
                 &V::candidate_tensor, &V::why_opaque, &V::entry, &V::module, &V::suspended, &V::step);
}

void step_dealloc(PyObject* self) {
  using S = StepObject;
  delete reinterpret_cast<S*>(self)->results;
  free_object<S>(self, &S::operator_, &S::random, &S::numerics, &S::outputs, &S::kwargs, &S::args, &S::written,
                 &S::inputs);
}

void known_storage_dealloc(PyObject* self) {
  free_object<KnownStorageObject>(self, &KnownStorageObject::storage, &KnownStorageObject::value);
}

void window_dealloc(PyObject* self) {
  using W = WindowObject;
  PyMem_Free(reinterpret_cast<W*>(self)->dims);
  free_object<W>(self, &W::dtype, &W::value);
}

PyObject* value_new(PyTypeObject* type, PyObject* args, PyObject*) {
  long long nbytes, ordinal;
  PyObject* device;
  if (type != value_type || PyArg_ParseTuple(args, "LOL", &nbytes, &device, &ordinal) == 0) return nullptr;
  return guarded([&] { return new_value(nbytes, device, ordinal).release().ptr(); });
}

PyObject* step_new(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *op, *arguments, *kwargs, *inputs;
  if (PyArg_ParseTuple(args, "OOOO", &op, &arguments, &kwargs, &inputs) == 0) return nullptr;
  return guarded([&] {
    const auto held = [](PyObject* object) { return py::reinterpret_borrow<py::object>(object); };
    const auto which = is_true(op, names().is_elementwise) ? Numerics::kOfElements : Numerics::kAll;
    return new_step(op, which, held(arguments), held(kwargs), held(inputs)).release().ptr();
  });
}

PyObject* known_storage_new(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *storage, *value;
  if (PyArg_ParseTuple(args, "OO", &storage, &value) == 0) return nullptr;
  return guarded([&] { return new_known_storage(storage, value).release().ptr(); });
}

PyObject* num_handles(PyObject* self, void*) {
  return PyLong_FromLong(reinterpret_cast<ValueObject*>(self)->handles.size);
}

PyObject* value_is_wanted(PyObject* self, PyObject*) {
  return PyBool_FromLong(has_saved_tensors(reinterpret_cast<ValueObject*>(self)));
}

PyObject* value_is_available(PyObject* self, PyObject*) {
  return PyBool_FromLong(is_available(reinterpret_cast<ValueObject*>(self)));
}

PyObject* value_add_handle(PyObject* self, PyObject* handle) {
  return guarded([&] {
    add_handle(reinterpret_cast<ValueObject*>(self), handle);
    Py_RETURN_NONE;
  });
}

// The windows of its live saved tensors, in the order of saving.
PyObject* value_windows(PyObject* self, PyObject*) {
  return guarded([&] {
    py::list windows;
    for (const HandleObject* handle : reinterpret_cast<ValueObject*>(self)->handles) {
      if (handle != nullptr) windows.append(py::reinterpret_borrow<py::object>(handle->window));
    }
    return windows.release().ptr();
  });
}

// Removes and returns the newest handle of its value, None if there is none.
PyObject* value_take_last_handle(PyObject* self, PyObject*) {
  Handles& handles = reinterpret_cast<ValueObject*>(self)->handles;
  if (handles.size == 0) Py_RETURN_NONE;
  handles.size -= 1;
  HandleObject* handle = *handles.end();
  if (handle == nullptr) Py_RETURN_NONE;
  handle->listed_on = nullptr;
  return Py_NewRef(reinterpret_cast<PyObject*>(handle));
}

PyObject* step_outputs(PyObject* self, void*) {
  PyObject* outputs = reinterpret_cast<StepObject*>(self)->outputs;
  return outputs == nullptr ? PyTuple_New(0) : Py_NewRef(outputs);
}

PyObject* step_written(PyObject* self, void*) {
  PyObject* written = reinterpret_cast<StepObject*>(self)->written;
  return written == nullptr ? PyTuple_New(0) : Py_NewRef(written);
}

PyObject* step_add_written(PyObject* self, PyObject* value) {
  auto* step = reinterpret_cast<StepObject*>(self);
  return guarded([&] {
    if (step->written == nullptr) step->written = untracked(py::list().release().ptr());
    if (PyList_Append(step->written, value) != 0) throw py::error_already_set();
    Py_RETURN_NONE;
  });
}

PyObject* step_add_output(PyObject* self, PyObject* args) {
  PyObject* value;
  long kind, index;
  if (PyArg_ParseTuple(args, "O(ll)", &value, &kind, &index) == 0) return nullptr;
  return guarded([&] {
    add_output(reinterpret_cast<StepObject*>(self), reinterpret_cast<ValueObject*>(value), kind, index);
    Py_RETURN_NONE;
  });
}

PyObject* on_other(PyObject* self, PyObject* value) {
  return guarded([&] { return window_on(reinterpret_cast<WindowObject*>(self), value).release().ptr(); });
}

PyObject* window_shape(PyObject* self, void*) {
  const auto* window = reinterpret_cast<WindowObject*>(self);
  return guarded([&] { return tuple_of(sizes_of(window), window->num_dims).release().ptr(); });
}

PyObject* window_stride(PyObject* self, void*) {
  const auto* window = reinterpret_cast<WindowObject*>(self);
  return guarded([&] { return tuple_of(strides_of(window), window->num_dims).release().ptr(); });
}

PyMemberDef value_members[] = {
    OBJECT(ValueObject, "device", device),
    OBJECT(ValueObject, "step", step),
    OBJECT(ValueObject, "operator", operator_),
    OBJECT(ValueObject, "action", action),
    OBJECT(ValueObject, "held", held),
    OBJECT(ValueObject, "root", root),
    OBJECT(ValueObject, "stored", stored),
    SEEN(ValueObject, "cached", cached),
    OBJECT(ValueObject, "candidate_tensor", candidate_tensor),
    OBJECT(ValueObject, "why_opaque", why_opaque),
    OBJECT(ValueObject, "choice", choice),
    OBJECT(ValueObject, "entry", entry),
    SEEN(ValueObject, "module", module),
    NUMBER(ValueObject, "nbytes", nbytes),
    NUMBER(ValueObject, "ordinal", ordinal),
    NUMBER(ValueObject, "index", index),
    NUMBER(ValueObject, "call", call),
    NUMBER(ValueObject, "occurrence", occurrence),
    NUMBER(ValueObject, "result", result),
    NUMBER(ValueObject, "num_reads", num_reads),
    NUMBER(ValueObject, "version", version),
    NUMBER(ValueObject, "key", key),
    {"was_saved", T_BOOL, offsetof(ValueObject, was_saved), READONLY, nullptr},
    FLAG(ValueObject, "is_repeated", is_repeated),
    FLAG(ValueObject, "needs_collective", needs_collective),
    FLAG(ValueObject, "is_input", is_input),
    FLAG(ValueObject, "is_parameter", is_parameter),
    FLAG(ValueObject, "is_made", is_made),
    {"__weaklistoffset__", T_PYSSIZET, offsetof(ValueObject, weak_references), READONLY, nullptr},
    END};
PyMemberDef step_members[] = {OBJECT(StepObject, "operator", operator_),      OBJECT(StepObject, "args", args),
                              OBJECT(StepObject, "kwargs", kwargs),           OBJECT(StepObject, "inputs", inputs),
                              OBJECT(StepObject, "random", random),           OBJECT(StepObject, "numerics", numerics),
                              FLAG(StepObject, "grad_enabled", grad_enabled), END};
PyMemberDef known_storage_members[] = {OBJECT(KnownStorageObject, "storage", storage),
                                       OBJECT(KnownStorageObject, "value", value), END};
PyMemberDef window_members[] = {OBJECT(WindowObject, "value", value),   OBJECT(WindowObject, "dtype", dtype),
                                NUMBER(WindowObject, "offset", offset), FLAG(WindowObject, "is_conj", is_conj),
                                FLAG(WindowObject, "is_neg", is_neg),   END};
PyGetSetDef value_getters[] = {{"num_handles", num_handles, nullptr, nullptr, nullptr},
                               {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyGetSetDef step_getters[] = {{"outputs", step_outputs, nullptr, nullptr, nullptr},
                              {"written", step_written, nullptr, nullptr, nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyGetSetDef window_getters[] = {{"shape", window_shape, nullptr, nullptr, nullptr},
                                {"stride", window_stride, nullptr, nullptr, nullptr},
                                {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMethodDef value_methods[] = {{"add_handle", value_add_handle, METH_O, nullptr},
                               {"take_last_handle", value_take_last_handle, METH_NOARGS, nullptr},
                               {"is_wanted", value_is_wanted, METH_NOARGS, nullptr},
                               {"windows", value_windows, METH_NOARGS, nullptr},
                               {"is_available", value_is_available, METH_NOARGS, nullptr},
                               {nullptr, nullptr, 0, nullptr}};
PyMethodDef step_methods[] = {{"add_output", step_add_output, METH_VARARGS, nullptr},
                              {"add_written", step_add_written, METH_O, nullptr},
                              {nullptr, nullptr, 0, nullptr}};
PyMethodDef window_methods[] = {{"on", on_other, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

PyType_Slot value_slots[] = {{Py_tp_new, slot(value_new)},   {Py_tp_dealloc, slot(value_dealloc)},
                             {Py_tp_members, value_members}, {Py_tp_getset, value_getters},
                             {Py_tp_methods, value_methods}, {0, nullptr}};
PyType_Slot step_slots[] = {{Py_tp_new, slot(step_new)},   {Py_tp_dealloc, slot(step_dealloc)},
                            {Py_tp_members, step_members}, {Py_tp_getset, step_getters},
                            {Py_tp_methods, step_methods}, {0, nullptr}};
PyType_Slot known_storage_slots[] = {{Py_tp_new, slot(known_storage_new)},
                                     {Py_tp_dealloc, slot(known_storage_dealloc)},
                                     {Py_tp_members, known_storage_members},
                                     {0, nullptr}};
PyType_Slot window_slots[] = {{Py_tp_dealloc, slot(window_dealloc)},
                              {Py_tp_members, window_members},
                              {Py_tp_getset, window_getters},
                              {Py_tp_methods, window_methods},
                              {0, nullptr}};
}  // namespace

void add_graph_types(py::module_& module) {
  value_type = made<ValueObject>(module, "actckpt._C.Value", value_slots, 0);
  step_type = made<StepObject>(module, "actckpt._C.Step", step_slots, 0);
  known_storage_type = made<KnownStorageObject>(module, "actckpt._C.KnownStorage", known_storage_slots, 0);
  window_type = made<WindowObject>(module, "actckpt._C.Window", window_slots, Py_TPFLAGS_DISALLOW_INSTANTIATION);
}

}  // namespace actckpt::replay
