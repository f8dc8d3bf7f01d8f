#include "offload/handles.h"

#include <algorithm>
#include <memory>
#include <new>
#include <utility>

#include "core/reads.h"
#include "core/rescue.h"
#include "core/saved_identity.h"
#include "core/version_check.h"
#include "offload/bytes.h"
#include "offload/owned_memory.h"
#include "offload/reading.h"

namespace actckpt {
namespace {

struct UnmovedObject {
  PyObject_HEAD py::object tensor;
  py::object refusal;  // a weak reference to a tensor that is held directly: it makes `swap_tensors` refuse the tensor
  VersionCheck version_check;
  std::unique_ptr<SavedIdentity> original;
  bool is_held_itself;
};

struct MovedObject {
  PyObject_HEAD Placed placed;
  py::object device, dtype, shape, stride;
  py::object canary;  // shares the version counter, not the storage (Rule 3)
  long long offset_bytes, element_size;
  long long version;
  bool is_conj;
  bool needs_grad;
  std::unique_ptr<SavedIdentity> original;
};

PyTypeObject* unmoved_type = nullptr;
PyTypeObject* moved_type = nullptr;

UnmovedObject* unmoved_of(PyObject* self) { return reinterpret_cast<UnmovedObject*>(self); }
MovedObject* moved_of(PyObject* self) { return reinterpret_cast<MovedObject*>(self); }

template <typename Object>
void dealloc(PyObject* self) {
  py::error_scope pending;
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<Object*>(self)->~Object();
  PyObject_Free(self);
  Py_DECREF(type);
}

// A new object with default-constructed members.
template <typename Object>
Object* create(PyTypeObject* type) {
  Object* self = PyObject_New(Object, type);
  if (self == nullptr) throw_pending();
  const PyObject head = self->ob_base;
  new (self) Object();
  self->ob_base = head;
  return self;
}

[[noreturn]] void raise_changed(PyObject* shape, PyObject* dtype, long long found, long long expected) {
  raise(call_with(names().changed_in_place_error, shape, dtype, number(found).ptr(), number(expected).ptr()));
}

py::object unpack_unmoved(UnmovedObject* self) {
  PyObject* tensor = self->tensor.ptr();
  long long found = 0, expected = 0;
  if (self->version_check.is_changed(tensor, &found, &expected)) {
    raise_changed(reads().shape(tensor).ptr(), reads().dtype(tensor).ptr(), found, expected);
  }
  if (self->is_held_itself) return self->tensor;
  py::object alias = reads().detach(tensor);
  return self->original != nullptr ? self->original->resolved(std::move(alias)) : alias;
}

// `bytes` must have everything that is read: `set_` would enlarge a storage that is too small, with arbitrary contents.
void check_holds(const MovedObject* self, PyObject* bytes, long long nbytes) {
  if (holds(bytes, nbytes)) return;
  const py::object found = reads().nbytes(storage_behind(bytes));
  raise(call_with(names().freed_error, self->shape.ptr(), self->dtype.ptr(), found.ptr(),
                  number(start_of(bytes) + nbytes).ptr()));
}

// `nbytes` from `start` of a storage, as a tensor.
py::object bytes_at(PyObject* storage, long long start, long long nbytes, PyObject* device) {
  static PyObject* const dense = py::make_tuple(1).release().ptr();
  py::object tensor = empty_tensor(names().uint8, device);
  call_method_with(tensor.ptr(), names().set, storage, number(start).ptr(), py::make_tuple(nbytes).ptr(), dense);
  return tensor;
}

// Joins the bytes from several spans (NOTE [ Spans ]).
py::object fetch_joined(const MovedObject* self) {
  const long long start = self->placed.start, end = start + self->placed.nbytes;
  PyObject* const device = self->device.ptr();
  py::object whole = allocate_bytes(self->placed.nbytes, device);
  for (const py::object& object : self->placed.spans) {
    SpanObject* const span = span_of(object.ptr());
    const py::object found = fetch(span);
    check_holds(self, found.ptr(), span->nbytes);
    const long long first = std::max(span->start, start), last = std::min(span->start + span->nbytes, end);
    const py::object into = bytes_at(storage_behind(whole.ptr()), first - start, last - first, device);
    const long long from = start_of(found.ptr()) + first - span->start;
    call_method(into.ptr(), names().copy, bytes_at(storage_behind(found.ptr()), from, last - first, device).ptr());
  }
  return whole;
}

py::object fetch_bytes(const MovedObject* self) {
  if (self->placed.is_joined) return fetch_joined(self);
  py::object found = fetch(span_of(self->placed.spans.front().ptr()));
  check_holds(self, found.ptr(), self->placed.nbytes);
  return found;
}

void set_data(const py::object& tensor, PyObject* data) {
  if (PyObject_SetAttr(tensor.ptr(), names().data, data) != 0) throw_pending();
}

py::object unpack_moved(MovedObject* self) {
  const long long version = version_of(self->canary.ptr());
  if (version != self->version) {
    raise_changed(self->shape.ptr(), self->dtype.ptr(), version, self->version);
  }
  if (!self->needs_grad && call(names().reads_filled_late).ptr() == Py_True) {
    raise(call_with(names().filled_late_error, self->shape.ptr(), self->dtype.ptr()));
  }
  const py::object found = with_rescue(py::none(), [&] { return fetch_bytes(self); });
  const long long offset_bytes = self->offset_bytes - self->placed.start + start_of(found.ptr());
  py::object tensor = empty_tensor(self->dtype.ptr(), self->device.ptr());
  call_method_with(tensor.ptr(), names().set, storage_behind(found.ptr()),
                   number(offset_bytes / self->element_size).ptr(), self->shape.ptr(), self->stride.ptr());
  if (self->is_conj) tensor = call_method(tensor.ptr(), names().conj);
  // A fresh alias each time, with the canary's version counter (Rule 4).
  py::object alias = reads().detach(self->canary.ptr());
  set_data(alias, tensor.ptr());
  return self->original != nullptr ? self->original->with_attributes(std::move(alias)) : alias;
}

PyObject* unmoved_unpack(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* { return unpack_unmoved(unmoved_of(self)).release().ptr(); });
}

PyObject* moved_unpack(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* { return unpack_moved(moved_of(self)).release().ptr(); });
}

// One empty tensor per device, for canaries.
PyObject* no_bytes(PyObject* device) {
  static PyObject* const known = PyDict_New();
  PyObject* found = PyDict_GetItemWithError(known, device);
  if (found != nullptr) return found;
  if (PyErr_Occurred() != nullptr) throw_pending();
  const py::object made = empty_tensor(names().uint8, device);
  if (PyDict_SetItem(known, device, made.ptr()) != 0) throw_pending();
  return PyDict_GetItem(known, device);
}

// unmoved(tensor)
PyObject* unmoved(PyObject*, PyObject* tensor) {
  return guarded([&]() -> PyObject* { return new_unmoved(tensor).release().ptr(); });
}

PyMethodDef handles_functions[] = {
    {"unmoved", unmoved, METH_O, "unmoved(tensor): a handle of a tensor that is not moved."},
    {nullptr, nullptr, 0, nullptr}};

PyMethodDef unmoved_methods[] = {{"unpack", unmoved_unpack, METH_NOARGS, "The tensor; raises if it was changed."},
                                 {nullptr, nullptr, 0, nullptr}};
PyMethodDef moved_methods[] = {{"unpack", moved_unpack, METH_NOARGS, "The tensor; raises if it was changed."},
                               {nullptr, nullptr, 0, nullptr}};

PyType_Slot unmoved_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc<UnmovedObject>)},
                               {Py_tp_methods, unmoved_methods},
                               {Py_tp_doc, const_cast<char*>("A saved tensor that was not moved.")},
                               {0, nullptr}};
PyType_Slot moved_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(dealloc<MovedObject>)},
                             {Py_tp_methods, moved_methods},
                             {Py_tp_doc, const_cast<char*>("A saved tensor whose bytes are in a store.")},
                             {0, nullptr}};
PyType_Spec unmoved_spec = {"actckpt._C.Unmoved", sizeof(UnmovedObject), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, unmoved_slots};
PyType_Spec moved_spec = {"actckpt._C.Moved", sizeof(MovedObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, moved_slots};

}  // namespace

py::object new_unmoved(PyObject* tensor) {
  UnmovedObject* self = create<UnmovedObject>(unmoved_type);
  py::object handle = owned(self);
  // Others keep a parameter anyway. An output held directly would keep its own graph alive, and so may objects in its
  // attributes.
  self->is_held_itself = reads().is_leaf.is_true(tensor) && is_parameter(tensor);
  self->tensor = self->is_held_itself ? py::reinterpret_borrow<py::object>(tensor) : reads().detach(tensor);
  if (self->is_held_itself) {
    self->refusal = py::reinterpret_steal<py::object>(new_reference(tensor));
  } else {
    self->original = SavedIdentity::of(tensor);
  }
  self->version_check = VersionCheck(tensor, version_of(tensor), self->tensor.ptr());
  return handle;
}

py::object new_moved(PyObject* tensor, Placed placed, const TensorExtent& extent) {
  MovedObject* self = create<MovedObject>(moved_type);
  py::object handle = owned(self);
  self->placed = std::move(placed);
  self->device = reads().device(tensor);
  self->dtype = reads().dtype(tensor);
  self->shape = reads().shape(tensor);
  self->stride = reads().stride(tensor);
  self->element_size = extent.element_size;
  self->offset_bytes = extent.offset_bytes;
  self->is_conj = reads().is_conj.is_true(tensor);
  self->needs_grad = reads().requires_grad.is_true(tensor);
  self->version = extent.version;
  self->canary = reads().detach(tensor);
  set_data(self->canary, no_bytes(self->device.ptr()));
  self->original = SavedIdentity::of(tensor);
  return handle;
}

py::object unpack_handle(PyObject* handle) {
  if (Py_TYPE(handle) == moved_type) return unpack_moved(moved_of(handle));
  if (Py_TYPE(handle) == unmoved_type) return unpack_unmoved(unmoved_of(handle));
  return call_method(handle, names().unpack);
}

void add_handle_types(py::module_& module) {
  unmoved_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&unmoved_spec));
  moved_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&moved_spec));
  if (unmoved_type == nullptr || moved_type == nullptr) throw_pending();
  module.add_object("Unmoved", reinterpret_cast<PyObject*>(unmoved_type));
  module.add_object("Moved", reinterpret_cast<PyObject*>(moved_type));
  if (PyModule_AddFunctions(module.ptr(), handles_functions) < 0) throw_pending();
}

}  // namespace actckpt
