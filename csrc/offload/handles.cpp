#include "offload/handles.h"

#include <memory>
#include <new>
#include <utility>

#include "core/original.h"
#include "core/reads.h"
#include "core/witness.h"
#include "offload/bytes.h"
#include "offload/reading.h"

namespace actckpt {
namespace {

struct StaysObject {
  PyObject_HEAD py::object tensor;
  py::object refusal;  // a weak reference to what is held itself: `swap_tensors` takes nothing that has one
  Witness witness;
  std::unique_ptr<Original> original;
  bool is_held_itself;
};

struct MovedObject {
  PyObject_HEAD py::object span;
  py::object device, dtype, shape, stride;
  py::object canary;  // shares the version counter, not the storage (Rule 3)
  long long span_start, span_bytes;
  long long offset_bytes, element_size;
  long long version;
  bool is_conj;
  std::unique_ptr<Original> original;
};

PyTypeObject* stays_type = nullptr;
PyTypeObject* moved_type = nullptr;

StaysObject* stays_of(PyObject* self) { return reinterpret_cast<StaysObject*>(self); }
MovedObject* moved_of(PyObject* self) { return reinterpret_cast<MovedObject*>(self); }

template <typename Object>
void dealloc(PyObject* self) {
  py::error_scope pending;
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<Object*>(self)->~Object();
  PyObject_Free(self);
  Py_DECREF(type);
}

// A new object, all of whose members are as a constructor leaves them.
template <typename Object>
Object* create(PyTypeObject* type) {
  Object* self = PyObject_New(Object, type);
  if (self == nullptr) throw_pending();
  const PyObject head = self->ob_base;
  new (self) Object();
  self->ob_base = head;
  return self;
}

template <typename Object>
py::object owned(Object* self) {
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

[[noreturn]] void raise_changed(PyObject* shape, PyObject* dtype, long long found, long long expected) {
  raise(call_with(names().changed_in_place_error, shape, dtype, number(found).ptr(), number(expected).ptr()));
}

// A parameter, or a leaf like one.
bool is_parameter_itself(PyObject* tensor) {
  if (!reads().is_leaf.is_true(tensor)) return false;
  if (reads().requires_grad.is_true(tensor)) return true;
  return is_instance(tensor, names().parameter_type);
}

py::object unpack_stays(StaysObject* self) {
  PyObject* tensor = self->tensor.ptr();
  long long found = 0, expected = 0;
  if (self->witness.is_changed(tensor, &found, &expected)) {
    raise_changed(attribute(tensor, names().shape).ptr(), attribute(tensor, names().dtype).ptr(), found, expected);
  }
  if (self->is_held_itself) return self->tensor;
  py::object alias = reads().detach(tensor);
  return self->original != nullptr ? self->original->resolved(std::move(alias)) : alias;
}

// The bytes of the span; throws where the memory behind them is gone.
py::object fetch_bytes(MovedObject* self) {
  PyObject* span = self->span.ptr();
  py::object found = Py_TYPE(span) == span_type ? fetch(span_of(span)) : call_method(span, names().fetch);
  if (!is_bytes(found.ptr())) throw py::type_error("fetch gave something else than Bytes");
  // A storage that is too small would be enlarged by `set_`, with whatever bytes are there.
  const long long needed = start_of(found.ptr()) + self->span_bytes;
  const long long size = integer_of_call(storage_behind(found.ptr()), names().nbytes);
  if (size < needed) {
    raise(
        call_with(names().freed_error, self->shape.ptr(), self->dtype.ptr(), number(size).ptr(), number(needed).ptr()));
  }
  return found;
}

py::object empty_tensor(PyObject* dtype, PyObject* device) {
  static PyObject* const zero = PyLong_FromLong(0);
  PyObject* arguments[] = {zero, dtype, device};
  PyObject* made = PyObject_Vectorcall(names().empty, arguments, 1, names().keywords_dtype_device);
  if (made == nullptr) throw_pending();
  return py::reinterpret_steal<py::object>(made);
}

void set_data(const py::object& tensor, PyObject* data) {
  if (PyObject_SetAttr(tensor.ptr(), names().data, data) != 0) throw_pending();
}

py::object unpack_moved(MovedObject* self) {
  const long long version = version_of(self->canary.ptr());
  if (version != self->version) {
    raise_changed(self->shape.ptr(), self->dtype.ptr(), version, self->version);
  }
  const py::object found = fetch_bytes(self);
  const long long offset_bytes = self->offset_bytes - self->span_start + start_of(found.ptr());
  py::object tensor = empty_tensor(self->dtype.ptr(), self->device.ptr());
  call_method_with(tensor.ptr(), names().set, storage_behind(found.ptr()),
                   number(offset_bytes / self->element_size).ptr(), self->shape.ptr(), self->stride.ptr());
  if (self->is_conj) tensor = call_method(tensor.ptr(), names().conj);
  // A fresh alias each time, with the canary's version counter (Rule 4).
  py::object alias = call_method(self->canary.ptr(), names().detach);
  set_data(alias, tensor.ptr());
  return self->original != nullptr ? self->original->with_attributes(std::move(alias)) : alias;
}

PyObject* stays_unpack(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* { return unpack_stays(stays_of(self)).release().ptr(); });
}

PyObject* moved_unpack(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* { return unpack_moved(moved_of(self)).release().ptr(); });
}

// None where the bytes lie in several spans: they were moved by others before.
PyObject* moved_timing(PyObject* self, void*) {
  return guarded([&]() -> PyObject* {
    PyObject* span = moved_of(self)->span.ptr();
    if (Py_TYPE(span) != span_type) Py_RETURN_NONE;
    return attribute(span_of(span)->ticket, names().timing).release().ptr();
  });
}

// One empty tensor per device, for canaries to point to.
PyObject* no_bytes(PyObject* device) {
  static PyObject* const known = PyDict_New();
  PyObject* found = PyDict_GetItemWithError(known, device);
  if (found != nullptr) return found;
  if (PyErr_Occurred() != nullptr) throw_pending();
  const py::object made = empty_tensor(names().uint8, device);
  if (PyDict_SetItem(known, device, made.ptr()) != 0) throw_pending();
  return PyDict_GetItem(known, device);
}

PyMethodDef stays_methods[] = {{"unpack", stays_unpack, METH_NOARGS, "The tensor; raises if it was changed."},
                               {nullptr, nullptr, 0, nullptr}};
PyMethodDef moved_methods[] = {{"unpack", moved_unpack, METH_NOARGS, "The tensor; raises if it was changed."},
                               {nullptr, nullptr, 0, nullptr}};

PyGetSetDef moved_properties[] = {
    {"timing", moved_timing, nullptr, "How long the program waited for the bytes, or None.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot stays_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc<StaysObject>)},
                             {Py_tp_methods, stays_methods},
                             {Py_tp_doc, const_cast<char*>("A saved tensor that was not moved.")},
                             {0, nullptr}};
PyType_Slot moved_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc<MovedObject>)},
                             {Py_tp_methods, moved_methods},
                             {Py_tp_getset, moved_properties},
                             {Py_tp_doc, const_cast<char*>("A saved tensor whose bytes are in a store.")},
                             {0, nullptr}};
PyType_Spec stays_spec = {"actckpt._C.Stays", sizeof(StaysObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, stays_slots};
PyType_Spec moved_spec = {"actckpt._C.Moved", sizeof(MovedObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, moved_slots};

}  // namespace

py::object new_stays(PyObject* tensor) {
  StaysObject* self = create<StaysObject>(stays_type);
  py::object handle = owned(self);
  // Who has it keeps it anyway. An output held as such would keep its own graph alive, and what its attributes refer to
  // may lead there too.
  self->is_held_itself = is_parameter_itself(tensor);
  self->tensor = self->is_held_itself ? py::reinterpret_borrow<py::object>(tensor) : reads().detach(tensor);
  if (self->is_held_itself) {
    PyObject* reference = PyWeakref_NewRef(tensor, nullptr);
    if (reference == nullptr) throw_pending();
    self->refusal = py::reinterpret_steal<py::object>(reference);
  } else {
    self->original = Original::of(tensor);
  }
  self->witness = Witness(tensor, version_of(tensor), self->tensor.ptr());
  return handle;
}

py::object new_moved(PyObject* tensor, const py::object& span, const TensorExtent& extent) {
  MovedObject* self = create<MovedObject>(moved_type);
  py::object handle = owned(self);
  self->span = span;
  self->span_start = integer(span.ptr(), names().start);
  self->span_bytes = integer(span.ptr(), names().nbytes);
  self->device = attribute(tensor, names().device);
  self->dtype = attribute(tensor, names().dtype);
  self->shape = attribute(tensor, names().shape);
  self->stride = call_method(tensor, names().stride);
  self->element_size = extent.element_size;
  self->offset_bytes = extent.offset_bytes;
  self->is_conj = call_method(tensor, names().is_conj).ptr() == Py_True;
  self->version = extent.version;
  self->canary = call_method(tensor, names().detach);
  set_data(self->canary, no_bytes(self->device.ptr()));
  self->original = Original::of(tensor);
  return handle;
}

py::object unpack_handle(PyObject* handle) {
  if (Py_TYPE(handle) == moved_type) return unpack_moved(moved_of(handle));
  if (Py_TYPE(handle) == stays_type) return unpack_stays(stays_of(handle));
  return call_method(handle, names().unpack);
}

void add_handle_types(py::module_& module) {
  stays_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&stays_spec));
  moved_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&moved_spec));
  if (stays_type == nullptr || moved_type == nullptr) throw_pending();
  module.add_object("Stays", reinterpret_cast<PyObject*>(stays_type));
  module.add_object("Moved", reinterpret_cast<PyObject*>(moved_type));
}

}  // namespace actckpt
