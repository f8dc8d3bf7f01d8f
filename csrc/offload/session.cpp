#include "offload/session.h"

#include <new>
#include <utility>

#include "core/extensions.h"
#include "core/meter.h"
#include "core/open_reruns.h"
#include "offload/bytes.h"
#include "offload/handles.h"
#include "offload/reading.h"

namespace actckpt {
namespace {

enum class Target { kAuto, kHost, kDisk };

// As `min_bytes`: nothing is to be moved. EVERYTHING_STAYS in actckpt/_offload/session.py.
constexpr long long kNothing = 1LL << 62;

struct SessionObject {
  PyObject_HEAD std::shared_ptr<Record> record;
  long long min_bytes;
  bool must;       // wait for room rather than leave bytes where they are
  bool has_moved;  // something, or what was moved already was saved again
  Target target;
  PyObject* guarded;  // the backend that memory was last guarded for, or null
};

SessionObject* session_of(PyObject* self) { return reinterpret_cast<SessionObject*>(self); }

bool is_leaf_with_grad(PyObject* tensor) {
  return is_true(tensor, names().requires_grad) && is_true(tensor, names().is_leaf);
}

// The storage; null where its bytes cannot be reached, as of torch.func's wrappers.
py::object reachable_storage(PyObject* tensor) {
  try {
    py::object storage = call_method(tensor, names().untyped_storage);
    return integer_of_call(storage.ptr(), names().data_ptr) == 0 ? py::object() : storage;
  } catch (py::error_already_set& error) {
    // NotImplementedError is a RuntimeError.
    if (!error.matches(PyExc_RuntimeError)) throw;
    return {};
  }
}

void note_parameter(PyObject* parameter) {
  const py::object storage = reachable_storage(parameter);
  if (storage) note_owned(storage.ptr());
}

// Rule 1: whether the tensor or what it is a view of is a parameter. Notes its storage.
bool is_parameter(PyObject* root) {
  if (!is_instance(root, names().parameter_type) && !is_leaf_with_grad(root)) return false;
  note_parameter(root);
  return true;
}

bool has_layout_that_moves(PyObject* tensor) {
  return attribute(tensor, names().layout).ptr() == names().strided && !is_true(tensor, names().is_nested);
}

bool is_of_a_kind_that_moves(PyObject* tensor) {
  return !is_true(tensor, names().is_quantized) && call_method(tensor, names().is_inference).ptr() != Py_True &&
         call_method(tensor, names().is_neg).ptr() != Py_True;
}

// Sets `is_cuda`; false where no store takes tensors of this device.
bool is_on_a_device_that_moves(const SessionObject* session, PyObject* tensor, bool* is_cuda) {
  *is_cuda = false;
  if (is_true(tensor, names().is_cpu)) return session->target != Target::kHost;
  *is_cuda = is_true(tensor, names().is_cuda);
  return *is_cuda && session->target != Target::kDisk;
}

long long item(PyObject* tuple, Py_ssize_t i) {
  const long long value = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i));
  if (value == -1 && PyErr_Occurred() != nullptr) throw_pending();
  return value;
}

// First byte and byte count of what `tensor` moves (Rule 2 of NOTE [ Spans ]).
TensorExtent extent_of(PyObject* tensor, PyObject* root, PyObject* storage) {
  TensorExtent extent{};
  extent.storage = storage;
  extent.root = root;
  extent.version = version_of(tensor);
  extent.element_size = integer_of_call(tensor, names().element_size);
  extent.offset_bytes = integer_of_call(tensor, names().storage_offset) * extent.element_size;
  const py::object shape = attribute(tensor, names().shape);
  const py::object stride = call_method(tensor, names().stride);
  long long last = 0;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape.ptr()); ++i) {
    last += (item(shape.ptr(), i) - 1) * item(stride.ptr(), i);
  }
  extent.start = extent.offset_bytes;
  extent.nbytes = (last + 1) * extent.element_size;
  const long long whole = integer_of_call(storage, names().nbytes);
  if (2 * extent.nbytes >= whole) {
    extent.start = 0;
    extent.nbytes = whole;
  }
  return extent;
}

py::object put(const SessionObject* session, PyObject* backend, PyObject* source, PyObject* nbytes) {
  if (session->must) return call_method_with(backend, names().put, source, nbytes);
  PyObject* stack[] = {backend, source, nbytes, Py_False};
  PyObject* ticket = PyObject_VectorcallMethod(names().put, stack, 3, names().keyword_must);
  if (ticket == nullptr) throw_pending();
  return py::reinterpret_steal<py::object>(ticket);
}

// Moves `extent`; null where the store is full, or would make the caller wait who must not.
py::object move(SessionObject* session, PyObject* tensor, const TensorExtent& extent, PyObject* backend,
                bool may_share) {
  const py::object source = new_bytes(extent.storage, extent.start);
  SourceWatchPointer watch = mark_as_source(source.ptr());
  const py::object ticket = put(session, backend, source.ptr(), number(extent.nbytes).ptr());
  if (ticket.is_none()) return {};
  py::object span =
      new_span(extent, backend, ticket, std::move(watch), attribute(tensor, names().device).ptr(), may_share);
  note_moved(session->record, span_of(span.ptr()));
  return span;
}

py::object backend_for(SessionObject* session, bool is_cuda) {
  static PyObject* const host = PyUnicode_InternFromString("host");
  static PyObject* const disk = PyUnicode_InternFromString("disk");
  py::object backend = call(names().backend, is_cuda ? host : disk);
  if (backend.ptr() != session->guarded) {
    call(names().guard, backend.ptr());
    Py_XSETREF(session->guarded, Py_NewRef(backend.ptr()));
  }
  return backend;
}

// The span, or Python's Joined, that holds `extent`; null where the store is full.
py::object span_for(PyObject* self, PyObject* tensor, const TensorExtent& extent, bool is_cuda, bool may_share) {
  SessionObject* session = session_of(self);
  std::vector<py::object> overlapping;
  if (may_share) {
    py::object found = find_span(extent, &overlapping);
    if (found) {
      share(span_of(found.ptr()));
      sums().deduplicated_bytes += integer(tensor, names().nbytes);
      return found;
    }
  }
  const py::object backend = backend_for(session, is_cuda);
  if (overlapping.empty()) return move(session, tensor, extent, backend.ptr(), may_share);
  py::list others(overlapping.size());
  for (std::size_t i = 0; i < overlapping.size(); ++i) {
    PyList_SET_ITEM(others.ptr(), static_cast<Py_ssize_t>(i), overlapping[i].release().ptr());
  }
  py::object joined = call_with(names().join, self, tensor, backend.ptr(), number(extent.start).ptr(),
                                number(extent.nbytes).ptr(), others.ptr());
  return joined.is_none() ? py::object() : joined;
}

// Counts a saved tensor that stays since it is small, unless somebody else holds it anyway.
void note_small(const SessionObject* session, PyObject* tensor, long long nbytes) {
  Record* record = session->record.get();
  if (!record->meter || is_true(tensor, names().is_leaf)) return;
  const py::object storage = reachable_storage(tensor);
  if (!storage || is_known_owned(storage.ptr())) return;
  record->num_small += 1;
  record->small_bytes += nbytes;
  note_alive(record->meter.ptr(), storage.ptr());
}

// Whether a plain tensor stays because of what or where it is; otherwise sets storage and root.
bool stays(const SessionObject* session, PyObject* tensor, py::object* storage, py::object* root, bool* is_cuda) {
  if (is_leaf_with_grad(tensor)) {
    note_parameter(tensor);
    return true;
  }
  if (!has_layout_that_moves(tensor)) return true;
  const long long nbytes = integer(tensor, names().nbytes);
  if (nbytes == 0) return true;
  if (nbytes < session->min_bytes) {
    note_small(session, tensor, nbytes);
    if (session->min_bytes < kNothing) ++sums().kept_small;
    return true;
  }
  if (!is_of_a_kind_that_moves(tensor) || !is_on_a_device_that_moves(session, tensor, is_cuda)) return true;
  *root = attribute(tensor, names().base);
  if (root->is_none()) {
    *root = py::reinterpret_borrow<py::object>(tensor);
  } else if (is_parameter(root->ptr())) {
    return true;
  }
  *storage = reachable_storage(tensor);
  if (!*storage || is_known_owned(storage->ptr())) return true;
  return is_true(root->ptr(), names().is_leaf) && call(names().is_owned, tensor).ptr() == Py_True;
}

py::object pack(PyObject* self, PyObject* tensor, bool may_share) {
  SessionObject* session = session_of(self);
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  if (is_in_rerun()) return new_stays(tensor);
  if (any_is_true(names().must_stay, tensor)) return new_stays(tensor);
  if (type == names().parameter_type) {
    note_parameter(tensor);
    return new_stays(tensor);
  }
  if (type != names().tensor_type) return call_with(names().pack_otherwise, self, tensor);
  py::object storage, root;
  bool is_cuda = false;
  if (stays(session, tensor, &storage, &root, &is_cuda)) return new_stays(tensor);
  note_alive(session->record->meter.ptr(), storage.ptr());
  const TensorExtent extent = extent_of(tensor, root.ptr(), storage.ptr());
  const py::object span = span_for(self, tensor, extent, is_cuda, may_share);
  if (!span) return new_stays(tensor);
  session->has_moved = true;
  return new_moved(tensor, span, extent);
}

// pack(tensor, may_share=True)
PyObject* session_pack(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  return guarded([&]() -> PyObject* {
    const Py_ssize_t given = nargs + (kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames));
    const bool is_named =
        given == 2 && nargs == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, 0), "may_share") == 0;
    if (given != 1 && !is_named && nargs != 2) throw py::type_error("takes pack(tensor, may_share=True)");
    return pack(self, args[0], given == 1 || PyObject_IsTrue(args[1]) == 1).release().ptr();
  });
}

// read_ahead()
PyObject* session_read_ahead(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    read_ahead_of(session_of(self)->record);
    Py_RETURN_NONE;
  });
}

// watch(meter)
PyObject* session_watch(PyObject* self, PyObject* meter) {
  session_of(self)->record->meter = py::reinterpret_borrow<py::object>(meter);
  Py_RETURN_NONE;
}

// moved_and_small() -> tuple of two numbers of tensors, each with their bytes
PyObject* session_moved_and_small(PyObject* self, PyObject*) {
  const Record* record = session_of(self)->record.get();
  return Py_BuildValue("LLLL", record->num_moved, record->moved_bytes, record->num_small, record->small_bytes);
}

// move(tensor, backend, start, nbytes) -> Span | None
PyObject* session_move(PyObject* self, PyObject* const* args, Py_ssize_t nargs) {
  return guarded([&]() -> PyObject* {
    if (nargs != 4) throw py::type_error("takes move(tensor, backend, start, nbytes)");
    const py::object storage = call_method(args[0], names().untyped_storage);
    py::object root = attribute(args[0], names().base);
    if (root.is_none()) root = py::reinterpret_borrow<py::object>(args[0]);
    TensorExtent extent = extent_of(args[0], root.ptr(), storage.ptr());
    extent.start = PyLong_AsLongLong(args[2]);
    extent.nbytes = PyLong_AsLongLong(args[3]);
    py::object span = move(session_of(self), args[0], extent, args[1], true);
    return span ? span.release().ptr() : Py_NewRef(Py_None);
  });
}

PyObject* session_unpack(PyObject*, PyObject* handle) {
  return guarded([&]() -> PyObject* { return unpack_handle(handle).release().ptr(); });
}

PyObject* session_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* keywords[] = {"to", "min_bytes", "must", nullptr};
  const char* to = nullptr;
  long long min_bytes = 0;
  int must = 1;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sL|p", const_cast<char**>(keywords), &to, &min_bytes, &must)) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  SessionObject* session = session_of(self);
  new (&session->record) std::shared_ptr<Record>(std::make_shared<Record>());
  session->record->previous = last_moved();  // until it moves something itself
  session->min_bytes = min_bytes;
  session->must = must != 0;
  session->has_moved = false;
  const std::string name = to;
  session->target = name == "host" ? Target::kHost : name == "disk" ? Target::kDisk : Target::kAuto;
  session->guarded = nullptr;
  return self;
}

void session_dealloc(PyObject* self) {
  using RecordPointer = std::shared_ptr<Record>;
  py::error_scope pending;
  session_of(self)->record.~RecordPointer();
  Py_XDECREF(session_of(self)->guarded);
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef methods[] = {
    {"pack", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(session_pack)), METH_FASTCALL | METH_KEYWORDS,
     "pack(tensor, may_share=True) -> handle: the pack hook."},
    {"unpack", session_unpack, METH_O | METH_STATIC, "unpack(handle) -> Tensor: the unpack hook."},
    {"read_ahead", session_read_ahead, METH_NOARGS,
     "read_ahead(): a backward has come here; begin to bring back what it needs next."},
    {"watch", session_watch, METH_O, "watch(meter): count on it what of the values is alive."},
    {"moved_and_small", session_moved_and_small, METH_NOARGS,
     "moved_and_small() -> number and bytes of storages moved, and of tensors that stay since they are small."},
    {"move", fast(session_move), METH_FASTCALL, "move(tensor, backend, start, nbytes) -> Span or None."},
    {nullptr, nullptr, 0, nullptr}};

PyObject* session_has_moved(PyObject* self, void*) { return PyBool_FromLong(session_of(self)->has_moved ? 1 : 0); }

PyGetSetDef properties[] = {
    {"has_moved", session_has_moved, nullptr, "Whether anything that was packed is in a store.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot session_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(session_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(session_dealloc)},
    {Py_tp_methods, methods},
    {Py_tp_getset, properties},
    {Py_tp_doc, const_cast<char*>("Session(to, min_bytes, must=True): one `offload` block.")},
    {0, nullptr}};
PyType_Spec session_spec = {"actckpt._C.OffloadSession", sizeof(SessionObject), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, session_slots};

PyObject* stays_of_tensor(PyObject*, PyObject* tensor) {
  return guarded([&]() -> PyObject* { return new_stays(tensor).release().ptr(); });
}

PyMethodDef session_functions[] = {{"stays", stays_of_tensor, METH_O, "stays(tensor): a handle that moves nothing."},
                                   {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_session_type(py::module_& module) {
  PyObject* type = PyType_FromSpec(&session_spec);
  if (type == nullptr) throw_pending();
  module.add_object("OffloadSession", type);
  if (PyModule_AddFunctions(module.ptr(), session_functions) < 0) throw_pending();
}

}  // namespace actckpt
