#include "offload/session.h"

#include <new>
#include <string>
#include <utility>

#include "core/extensions.h"
#include "core/meter.h"
#include "core/open_reruns.h"
#include "core/reads.h"
#include "offload/handles.h"
#include "offload/moving.h"
#include "offload/owned_memory.h"
#include "offload/reading.h"

namespace actckpt {
namespace {

enum class Target { kAuto, kHost, kDisk };

// A `min_bytes` above the size of any tensor: everything stays.
constexpr long long kEverythingStays = 1LL << 62;

struct SessionObject {
  PyObject_HEAD std::shared_ptr<Record> record;
  long long min_bytes;
  bool must;       // wait for room instead of leaving bytes in place
  bool has_moved;  // offloaded something, or saved offloaded bytes again
  Target target;
  py::object store_object;  // the store used last, guarded
  std::shared_ptr<Store> store;
};

SessionObject* session_of(PyObject* self) { return reinterpret_cast<SessionObject*>(self); }

bool has_layout_that_moves(PyObject* tensor) {
  return reads().layout(tensor).ptr() == names().strided && !reads().is_nested.is_true(tensor);
}

bool is_of_a_kind_that_moves(PyObject* tensor) {
  return !reads().is_quantized.is_true(tensor) && !reads().is_inference.is_true(tensor);
}

// Whether a subclass is offloaded part by part.
bool comes_apart(PyObject* tensor) {
  return PyObject_HasAttr(reinterpret_cast<PyObject*>(Py_TYPE(tensor)), names().flatten) != 0 &&
         has_layout_that_moves(tensor) && is_of_a_kind_that_moves(tensor) && !is_parameter(root_of(tensor).ptr());
}

// Sets the tensor's device type; false if tensors of that device stay.
bool is_on_a_device_that_moves(const SessionObject* session, PyObject* tensor, py::object* device_type) {
  if (reads().is_cpu.is_true(tensor)) {
    *device_type = py::reinterpret_borrow<py::object>(names().cpu);
    return session->target != Target::kHost;
  }
  if (session->target == Target::kDisk || reads().is_meta.is_true(tensor)) return false;
  *device_type = attribute(reads().device(tensor).ptr(), names().type);
  return true;
}

// The store for tensors of such devices, by the current settings. Throws if no store can take them.
py::object find_store(PyObject* device_type) {
  PyObject* const entry = PyDict_GetItemWithError(names().stores, device_type);
  PyObject* const generation = PyDict_GetItemWithError(names().settings, names().generation);
  const bool is_ready =
      entry != nullptr && PyObject_RichCompareBool(PyTuple_GET_ITEM(entry, 0), generation, Py_EQ) == 1;
  if (!is_ready) return call(names().store_for, device_type);
  return py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(entry, 1));
}

// Where tensors of such devices are offloaded to.
Destination destination_for(SessionObject* session, const py::object& device_type) {
  py::object found = find_store(device_type.ptr());
  if (found.ptr() != session->store_object.ptr()) {
    session->store = store_behind(found.ptr());
    session->store_object = std::move(found);
  }
  return {session->store_object, session->store, session->record, session->must};
}

// Whether operators are being traced into a graph, which runs later with other bytes. Tracing is a dispatch mode.
bool is_traced() {
  return call(names().num_dispatch_modes).cast<int>() > 0 && call(names().is_tracing).ptr() == Py_True;
}

// Counts the storage of a saved tensor that stays because it is small, once, unless it is kept anyway.
void note_small(const SessionObject* session, PyObject* tensor, long long nbytes) {
  Record* record = session->record.get();
  if (!record->meter || reads().is_leaf.is_true(tensor)) return;
  const py::object root = root_of(tensor);
  if (root.ptr() != tensor && is_parameter(root.ptr())) return;
  const py::object storage = reachable_storage(tensor);
  if (!storage || is_known_owned(storage.ptr()) || !note_alive(record->meter.ptr(), storage.ptr())) return;
  record->num_small += 1;
  record->small_bytes += nbytes;
}

// Whether a plain tensor stays because of its kind or device; else sets storage and root.
bool stays(const SessionObject* session, PyObject* tensor, bool is_made, py::object* storage, py::object* root,
           py::object* device_type) {
  const bool is_leaf = reads().is_leaf.is_true(tensor);
  if (is_leaf && reads().requires_grad.is_true(tensor)) {
    note_owned(tensor);
    return true;
  }
  if (!has_layout_that_moves(tensor)) return true;
  const long long nbytes = reads().tensor_nbytes.number(tensor);
  if (nbytes == 0) return true;
  if (nbytes < session->min_bytes) {
    note_small(session, tensor, nbytes);
    if (session->min_bytes < kEverythingStays) ++sums().kept_small;
    return true;
  }
  if (!is_of_a_kind_that_moves(tensor) || reads().is_neg.is_true(tensor) ||
      !is_on_a_device_that_moves(session, tensor, device_type)) {
    return true;
  }
  *root = root_of(tensor);
  const bool is_view = root->ptr() != tensor;
  if (is_view && is_parameter(root->ptr())) {
    note_owned(root->ptr());
    return true;
  }
  *storage = reachable_storage(tensor);
  if (!*storage || is_known_owned(storage->ptr())) return true;
  const bool may_be_owned = !is_made && (is_view ? reads().is_leaf.is_true(root->ptr()) : is_leaf);
  if (may_be_owned && call(names().is_owned, tensor).ptr() == Py_True) return true;
  return is_traced();
}

// `is_made`: an operator made its storage, so no module owns it.
py::object pack(PyObject* self, PyObject* tensor, bool may_share, bool is_made) {
  SessionObject* session = session_of(self);
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  if (is_in_rerun()) return new_unmoved(tensor);
  if (any_is_true(names().excludes_from_offload, tensor)) return new_unmoved(tensor);
  if (type == names().parameter_type) {
    note_owned(tensor);
    return new_unmoved(tensor);
  }
  if (type != names().tensor_type) {
    return comes_apart(tensor) ? call_with(names().pack_parts, self, tensor) : new_unmoved(tensor);
  }
  py::object storage, root, device_type;
  if (stays(session, tensor, is_made, &storage, &root, &device_type)) return new_unmoved(tensor);
  note_alive(session->record->meter.ptr(), storage.ptr());
  const TensorExtent extent = extent_of(tensor, root.ptr(), storage.ptr());
  Placed placed = place(destination_for(session, device_type), tensor, extent, may_share);
  if (placed.spans.empty()) return new_unmoved(tensor);
  session->has_moved = true;
  return new_moved(tensor, std::move(placed), extent);
}

// pack(tensor, may_share=True)
PyObject* session_pack(PyObject* self, PyObject* const* args, Py_ssize_t nargs, PyObject* kwnames) {
  return guarded([&]() -> PyObject* {
    const Py_ssize_t given = nargs + (kwnames == nullptr ? 0 : PyTuple_GET_SIZE(kwnames));
    const bool is_named =
        given == 2 && nargs == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(kwnames, 0), "may_share") == 0;
    if (given != 1 && !is_named && nargs != 2) throw py::type_error("takes pack(tensor, may_share=True)");
    return pack(self, args[0], given == 1 || PyObject_IsTrue(args[1]) == 1, false).release().ptr();
  });
}

// pack_made(tensor)
PyObject* session_pack_made(PyObject* self, PyObject* tensor) {
  return guarded([&]() -> PyObject* { return pack(self, tensor, true, true).release().ptr(); });
}

// watch(meter)
PyObject* session_watch(PyObject* self, PyObject* meter) {
  session_of(self)->record->meter = py::reinterpret_borrow<py::object>(meter);
  Py_RETURN_NONE;
}

// moved_and_small() -> tuple of two storage counts, each followed by the saved bytes of these
PyObject* session_moved_and_small(PyObject* self, PyObject*) {
  const Record* record = session_of(self)->record.get();
  return Py_BuildValue("LLLL", record->num_moved, record->moved_bytes, record->num_small, record->small_bytes);
}

PyObject* session_unpack(PyObject*, PyObject* handle) {
  // Borrowed from autograd: the saved tensor may be released while Python runs below.
  const auto owner = py::reinterpret_borrow<py::object>(handle);
  return guarded([&]() -> PyObject* { return unpack_handle(handle).release().ptr(); });
}

PyObject* session_new(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  static const char* keywords[] = {"to", "min_bytes", "must", "is_needed", nullptr};
  const char* to = nullptr;
  long long min_bytes = 0;
  int must = 1, is_needed = 1;
  if (!PyArg_ParseTupleAndKeywords(args, kwargs, "sL|pp", const_cast<char**>(keywords), &to, &min_bytes, &must,
                                   &is_needed)) {
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  SessionObject* session = session_of(self);
  new (&session->record) std::shared_ptr<Record>(std::make_shared<Record>());
  session->record->previous = last_moved();  // until it offloads something itself
  session->record->is_needed = is_needed != 0;
  session->min_bytes = min_bytes;
  session->must = must != 0;
  session->has_moved = false;
  const std::string name = to;
  session->target = name == "host" ? Target::kHost : name == "disk" ? Target::kDisk : Target::kAuto;
  new (&session->store_object) py::object();
  new (&session->store) std::shared_ptr<Store>();
  return self;
}

void session_dealloc(PyObject* self) {
  using RecordPointer = std::shared_ptr<Record>;
  using StorePointer = std::shared_ptr<Store>;
  py::error_scope pending;
  session_of(self)->record.~RecordPointer();
  session_of(self)->store.~StorePointer();
  session_of(self)->store_object.~object();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef session_methods[] = {
    {"pack", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(session_pack)), METH_FASTCALL | METH_KEYWORDS,
     "pack(tensor, may_share=True) -> handle: the pack hook."},
    {"pack_made", session_pack_made, METH_O,
     "pack_made(tensor) -> handle: of what an operator made; no module owns it."},
    {"unpack", session_unpack, METH_O | METH_STATIC, "unpack(handle) -> Tensor: the unpack hook."},
    {"watch", session_watch, METH_O, "watch(meter): count on it what of the values is alive."},
    {"moved_and_small", session_moved_and_small, METH_NOARGS,
     "moved_and_small() -> number and bytes of storages moved, and of those that stay since they are small."},
    {nullptr, nullptr, 0, nullptr}};

PyObject* session_has_moved(PyObject* self, void*) { return PyBool_FromLong(session_of(self)->has_moved ? 1 : 0); }

PyObject* session_hooks(PyObject* self, void*) {
  return guarded([&]() -> PyObject* {
    static PyObject* const pack_name = PyUnicode_InternFromString("pack");
    return py::make_tuple(attribute(self, pack_name), attribute(self, names().unpack)).release().ptr();
  });
}

PyGetSetDef properties[] = {
    {"hooks", session_hooks, nullptr, "The pack and unpack hooks.", nullptr},
    {"has_moved", session_has_moved, nullptr, "Whether anything that was packed is in a store.", nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot session_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(session_new)},
    {Py_tp_dealloc, reinterpret_cast<void*>(session_dealloc)},
    {Py_tp_methods, session_methods},
    {Py_tp_getset, properties},
    {Py_tp_doc, const_cast<char*>("Session(to, min_bytes, must=True): one `offload` block.")},
    {0, nullptr}};
PyType_Spec session_spec = {"actckpt._C.OffloadSession", sizeof(SessionObject), 0,
                            Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, session_slots};

}  // namespace

void add_session_type(py::module_& module) {
  PyObject* type = PyType_FromSpec(&session_spec);
  if (type == nullptr) throw_pending();
  module.add_object("OffloadSession", type);
  module.attr("EVERYTHING_STAYS") = kEverythingStays;
}

}  // namespace actckpt
