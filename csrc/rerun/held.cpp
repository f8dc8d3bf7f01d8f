#include "rerun/held.h"

#include <new>
#include <stdexcept>
#include <utility>

#include "core/collected.h"
#include "core/python.h"
#include "core/reads.h"

namespace actckpt {
namespace {

struct HeldObject {
  PyObject_HEAD py::object held;  // a tensor, or the object that outer hooks packed it into
  py::object unpack;              // null: no outer hooks
  py::object storage;             // of the tensor; null if it may be exchanged, or if there is none
  long long version;
  long long implementation;
  bool is_tensor;
  bool is_copy;  // of an inference tensor: each rerun gets its own
  bool requires_grad;
  bool is_of_parameter;  // a parameter, or a view of one
};

template <typename Visit>
void for_each_reference(HeldObject& held, const Visit& visit) {
  for (py::object* field : {&held.held, &held.unpack, &held.storage}) visit(field->ptr());
}

PyTypeObject* held_type = nullptr;

HeldObject* held_of(PyObject* self) { return reinterpret_cast<HeldObject*>(self); }

bool is_tensor(PyObject* object) { return is_of_type(object, names().tensor_type); }

py::object hold(PyObject* tensor, PyObject* pack, PyObject* unpack) {
  HeldObject* self = held_of(held_type->tp_alloc(held_type, 0));  // zeroed: the collector may visit it
  if (self == nullptr) throw py::error_already_set();
  new (&self->held) py::object();
  new (&self->unpack) py::object();
  new (&self->storage) py::object();
  auto owner = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
  self->requires_grad = reads().requires_grad.is_true(tensor);
  self->is_of_parameter = false;
  py::object kept = py::reinterpret_borrow<py::object>(tensor);
  self->version = 0;
  self->is_copy = !read_version(tensor, &self->version);
  if (self->is_copy) kept = call(names().own_copy, tensor);
  if (pack != Py_None) {
    const py::object base = py::reinterpret_borrow<py::object>(tensor).attr("_base");
    const py::handle root = base.is_none() ? py::handle(tensor) : py::handle(base);
    self->is_of_parameter = is_instance(root.ptr(), names().parameter_type);
    self->held = call(pack, kept.ptr());
    self->unpack = py::reinterpret_borrow<py::object>(unpack);
    self->is_tensor = is_tensor(self->held.ptr());
  } else {
    self->held = std::move(kept);
    self->is_tensor = true;
  }
  if (self->held.ptr() != tensor) self->version = self->is_tensor ? version_of(self->held.ptr()) : 0;
  if (self->is_tensor) {
    self->storage = memory_of(self->held.ptr());
    self->implementation = reads().implementation.number(self->held.ptr());
  }
  return owner;
}

py::object restore(PyObject* object) {
  HeldObject* self = held_of(object);
  if (!self->held) throw std::runtime_error("The tensor was freed with the region that held it.");
  if (self->is_tensor && (version_of(self->held.ptr()) != self->version ||
                          reads().implementation.number(self->held.ptr()) != self->implementation ||
                          (self->storage && memory_of(self->held.ptr()).ptr() != self->storage.ptr()))) {
    raise(call(names().changed_error, object));
  }
  if (!self->unpack) return self->is_copy ? call(names().own_copy, self->held.ptr()) : self->held;
  const py::object unpacked = call(self->unpack.ptr(), self->held.ptr());
  return leaf_of(self->is_copy ? call(names().own_copy, unpacked.ptr()) : unpacked, self->requires_grad,
                 self->is_of_parameter);
}

bool is_plain(PyObject* value) {
  return value == Py_None || PyBool_Check(value) || PyLong_CheckExact(value) || PyFloat_CheckExact(value) ||
         PyUnicode_CheckExact(value);
}

// Index of an earlier, identical entry, or `end`: each tensor is held and restored once.
Py_ssize_t first_same(PyObject* tuple, Py_ssize_t end) {
  Py_ssize_t i = 0;
  while (i < end && PyTuple_GET_ITEM(tuple, i) != PyTuple_GET_ITEM(tuple, end)) ++i;
  return i;
}

PyObject* held_restore(PyObject* self, PyObject*) {
  return guarded([&] { return restore(self).release().ptr(); });
}

PyObject* held_get_held(PyObject* self, void*) {
  const py::object& held = held_of(self)->held;
  return Py_NewRef(held ? held.ptr() : Py_None);
}

PyObject* held_get_version(PyObject* self, void*) { return PyLong_FromLongLong(held_of(self)->version); }

void held_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  HeldObject* held = held_of(self);
  held->storage.~object();
  held->unpack.~object();
  held->held.~object();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* hold_one(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 3) throw py::type_error("hold(tensor, pack, unpack) takes three arguments");
    return hold(args[0], args[1], args[2]).release().ptr();
  });
}

PyMethodDef held_methods[] = {
    {"restore", held_restore, METH_NOARGS, "The tensor for one rerun; raises if it was changed."},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef held_getset[] = {
    {"held", held_get_held, nullptr, "Tensor, or what the hooks outside packed it into.", nullptr},
    {"version", held_get_version, nullptr, "Version of the tensor when it was held.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot held_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(held_dealloc)},
                            {Py_tp_traverse, reinterpret_cast<void*>(collected::traverse<HeldObject>)},
                            {Py_tp_clear, reinterpret_cast<void*>(collected::clear<HeldObject>)},
                            {Py_tp_methods, held_methods},
                            {Py_tp_getset, held_getset},
                            {Py_tp_doc, const_cast<char*>("A tensor held for reruns.")},
                            {0, nullptr}};
PyType_Spec held_spec = {"actckpt._C.HeldTensor", sizeof(HeldObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_HAVE_GC, held_slots};

PyObject* without_graph_function(PyObject*, PyObject* tensor) {
  return guarded([&] { return without_graph(py::reinterpret_borrow<py::object>(tensor)).release().ptr(); });
}

}  // namespace

py::object leaf_of(const py::object& tensor, bool requires_grad, bool is_of_parameter) {
  const py::object leaf = call_method(tensor.ptr(), names().detach);
  if (requires_grad) call_method(leaf.ptr(), names().requires_grad_);
  // Nested regions must treat it as a parameter exactly if they did so in the forward.
  if (is_of_parameter) leaf.attr(kParameterMark) = py::bool_(true);
  return leaf;
}

py::object without_graph(const py::object& tensor) {
  if (!is_tensor(tensor.ptr()) || reads().is_leaf.is_true(tensor.ptr())) return tensor;
  return leaf_of(tensor, true, false);
}

py::object hold_arguments(PyObject* args, bool* on_device) {
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  py::tuple held(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* value = PyTuple_GET_ITEM(args, i);
    py::object item;
    if (is_plain_tensor(value)) {
      const Py_ssize_t same = first_same(args, i);
      item = same < i ? py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(held.ptr(), same))
                      : hold(value, Py_None, Py_None);
      *on_device = *on_device || !reads().is_cpu.is_true(value);
    } else if (is_plain(value)) {
      item = py::reinterpret_borrow<py::object>(value);
    } else {
      return {};
    }
    PyTuple_SET_ITEM(held.ptr(), i, item.release().ptr());
  }
  return std::move(held);
}

py::object restore_arguments(PyObject* held) {
  const Py_ssize_t count = PyTuple_GET_SIZE(held);
  py::tuple restored(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* value = PyTuple_GET_ITEM(held, i);
    const Py_ssize_t same = first_same(held, i);
    py::object item;
    if (Py_TYPE(value) != held_type) {
      item = py::reinterpret_borrow<py::object>(value);
    } else if (same < i) {
      item = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(restored.ptr(), same));
    } else {
      item = restore(value);
    }
    PyTuple_SET_ITEM(restored.ptr(), i, item.release().ptr());
  }
  return std::move(restored);
}

void add_held_types(py::module_& module) {
  held_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&held_spec));
  if (held_type == nullptr) throw py::error_already_set();
  module.add_object("HeldTensor", reinterpret_cast<PyObject*>(held_type));
  static PyMethodDef functions[] = {
      {"hold", fast(hold_one), METH_FASTCALL, "hold(tensor, pack, unpack) -> HeldTensor"},
      {"without_graph", without_graph_function, METH_O, "What to hold of an object that a forward displaced."},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), functions) < 0) throw py::error_already_set();
}

}  // namespace actckpt
