#include "offload/bytes.h"

#include <new>
#include <utility>

#include "core/reads.h"

namespace actckpt {
namespace {

struct BytesObject {
  PyObject_HEAD PyObject* storage;
  long long start;
  SourceWatchPointer watch;  // null: not a source
  py::object tensor;         // on the storage; may be null
};

PyTypeObject* bytes_type = nullptr;

thread_local bool is_allocating = false;

// Allocates what is loaded, for its lifetime.
struct Allocating {
  Allocating() { is_allocating = true; }
  ~Allocating() { is_allocating = false; }
};

BytesObject* object_of(PyObject* self) { return reinterpret_cast<BytesObject*>(self); }

PyObject* bytes_new(PyTypeObject*, PyObject* args, PyObject* kwargs) {
  static const char* names[] = {"storage", "start", nullptr};
  PyObject* storage = nullptr;
  long long start = 0;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OL", const_cast<char**>(names), &storage, &start)) {
    return nullptr;
  }
  return guarded([&]() -> PyObject* { return new_bytes(storage, start).release().ptr(); });
}

void bytes_dealloc(PyObject* self) {
  BytesObject* bytes = object_of(self);
  if (bytes->watch != nullptr) bytes->watch->end();
  bytes->watch.~SourceWatchPointer();
  bytes->tensor.~object();
  Py_DECREF(bytes->storage);
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyObject* get_storage(PyObject* self, void*) { return Py_NewRef(object_of(self)->storage); }

PyObject* get_bytes_start(PyObject* self, void*) { return PyLong_FromLongLong(object_of(self)->start); }

// is_loading() -> bool
PyObject* tell_loading(PyObject*, PyObject*) { return PyBool_FromLong(is_allocating ? 1 : 0); }

// is_source(storage) -> bool
PyObject* tell_source(PyObject*, PyObject* storage) { return PyBool_FromLong(is_source(storage)); }

// allocate_bytes(nbytes, device) -> Bytes
PyObject* allocate(PyObject*, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 2) throw py::type_error("takes allocate_bytes(nbytes, device)");
    return allocate_bytes(py::handle(args[0]).cast<long long>(), args[1]).release().ptr();
  });
}

PyGetSetDef bytes_getset[] = {{"storage", get_storage, nullptr, "The storage, kept alive.", nullptr},
                              {"start", get_bytes_start, nullptr, "First byte.", nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot bytes_slots[] = {{Py_tp_new, reinterpret_cast<void*>(bytes_new)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(bytes_dealloc)},
                             {Py_tp_getset, bytes_getset},
                             {Py_tp_doc, const_cast<char*>("Bytes(storage, start): a stretch of a storage "
                                                           "that the engine reads from or writes to.")},
                             {0, nullptr}};
PyType_Spec bytes_spec = {"actckpt._C.Bytes", sizeof(BytesObject), 0, Py_TPFLAGS_DEFAULT, bytes_slots};

PyMethodDef bytes_functions[] = {
    {"is_source", tell_source, METH_O, "is_source(storage): whether a copy out may be reading it."},
    {"is_loading", tell_loading, METH_NOARGS, "is_loading(): whether this thread is allocating memory to load into."},
    {"allocate_bytes", fast(allocate), METH_FASTCALL, "allocate_bytes(nbytes, device) -> Bytes to read into."},
    {nullptr, nullptr, 0, nullptr}};

// `torch.empty` of a size, without running Python code.
py::object new_tensor(PyObject* size, PyObject* dtype, PyObject* device) {
  PyObject* arguments[] = {size, dtype, device};
  PyObject* made = PyObject_Vectorcall(names().empty, arguments, 1, names().keywords_dtype_device);
  if (made == nullptr) throw_pending();
  return py::reinterpret_steal<py::object>(made);
}

}  // namespace

py::object new_bytes(PyObject* storage, long long start) {
  BytesObject* bytes = PyObject_New(BytesObject, bytes_type);
  if (bytes == nullptr) throw py::error_already_set();
  bytes->storage = Py_NewRef(storage);
  bytes->start = start;
  new (&bytes->watch) SourceWatchPointer();
  new (&bytes->tensor) py::object();
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(bytes));
}

SourceWatchPointer mark_as_source(PyObject* bytes) {
  object_of(bytes)->watch = std::make_shared<SourceWatch>(object_of(bytes)->storage);
  return object_of(bytes)->watch;
}

bool is_bytes(PyObject* object) { return Py_TYPE(object) == bytes_type; }

PyObject* storage_behind(PyObject* bytes) { return object_of(bytes)->storage; }

long long start_of(PyObject* bytes) { return object_of(bytes)->start; }

bool holds(PyObject* bytes, long long nbytes) {
  return reads().nbytes.number(storage_behind(bytes)) >= start_of(bytes) + nbytes;
}

py::object empty_tensor(PyObject* dtype, PyObject* device) {
  static PyObject* const zero = PyLong_FromLong(0);
  return new_tensor(zero, dtype, device);
}

py::object tensor_over(PyObject* bytes) {
  if (object_of(bytes)->tensor) return object_of(bytes)->tensor;
  PyObject* const storage = storage_behind(bytes);
  const py::object tensor = empty_tensor(names().uint8, attribute(storage, names().device).ptr());
  return call_method(tensor.ptr(), names().set, storage);
}

void keep_tensor(PyObject* bytes, py::object tensor) { object_of(bytes)->tensor = std::move(tensor); }

py::object allocate_bytes(long long nbytes, PyObject* device) {
  const Allocating now;
  const py::object tensor = new_tensor(number(nbytes).ptr(), names().uint8, device);
  return new_bytes(reads().untyped_storage(tensor.ptr()).ptr(), 0);
}

long long address_of(PyObject* bytes) { return reads().data_ptr.number(storage_behind(bytes)) + start_of(bytes); }

void add_bytes_type(py::module_& module) {
  bytes_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&bytes_spec));
  if (bytes_type == nullptr) throw py::error_already_set();
  module.add_object("Bytes", reinterpret_cast<PyObject*>(bytes_type));
  if (PyModule_AddFunctions(module.ptr(), bytes_functions) < 0) throw py::error_already_set();
}

}  // namespace actckpt
