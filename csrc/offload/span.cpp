#include "offload/span.h"

#include <algorithm>
#include <new>
#include <unordered_map>
#include <utility>

#include "offload/reading.h"

namespace actckpt {

PyTypeObject* span_type = nullptr;

namespace {

using Spans = std::vector<SpanObject*>;

// By identity of their storage, which their weak references confirm: addresses are used again.
std::unordered_map<PyObject*, Spans>& registry() {
  static auto* all = new std::unordered_map<PyObject*, Spans>();
  return *all;
}

// Storages of parameters, by identity, with weak references that confirm it.
struct Owned {
  std::unordered_map<PyObject*, py::object> references;
  std::size_t sweep_at = 1024;
};

Owned& owned() {
  static auto* all = new Owned();
  return *all;
}

// Whether a weak reference is one to `object`, which lives.
bool refers_to(const PyObject* object, PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  PyWeakref_GetRef(reference, &found);
  Py_XDECREF(found);
#else
  PyObject* found = PyWeakref_GetObject(reference);
#endif
  return found == object;
}

PyObject* new_reference(PyObject* object) {
  PyObject* reference = PyWeakref_NewRef(object, nullptr);
  if (reference == nullptr) throw_pending();
  return reference;
}

void remember(SpanObject* span, PyObject* storage) {
  registry()[storage].push_back(span);
  span->key = storage;
}

void span_dealloc(PyObject* self) {
  SpanObject* span = span_of(self);
  if (span->key != nullptr) {
    const auto found = registry().find(span->key);
    Spans& entries = found->second;
    entries.erase(std::find(entries.begin(), entries.end(), span));
    if (entries.empty()) registry().erase(found);
  }
  leave_window(span);
  if (span->record != nullptr) span->record->forget(span->place);
  using RecordPointer = std::shared_ptr<Record>;
  span->record.~RecordPointer();
  span->watch.~SourceWatchPointer();
  py::error_scope pending;  // dropping a ticket hands back references, whose ends may run anything
  Py_XDECREF(span->ticket);
  Py_XDECREF(span->backend);
  Py_XDECREF(span->device);
  Py_XDECREF(span->nbytes_object);
  Py_XDECREF(span->storage_reference);
  Py_XDECREF(span->root_reference);
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

PyObject* get_span_start(PyObject* self, void*) { return PyLong_FromLongLong(span_of(self)->start); }
PyObject* get_nbytes(PyObject* self, void*) { return PyLong_FromLongLong(span_of(self)->nbytes); }

PyObject* num_spans(PyObject*, PyObject*) { return PyLong_FromSize_t(registry().size()); }

PyObject* note_owned_storage(PyObject*, PyObject* storage) {
  return guarded([&]() -> PyObject* {
    note_owned(storage);
    Py_RETURN_NONE;
  });
}

PyObject* share_span(PyObject*, PyObject* span) {
  return guarded([&]() -> PyObject* {
    if (Py_TYPE(span) != span_type) throw py::type_error("share takes a Span");
    share(span_of(span));
    Py_RETURN_NONE;
  });
}

PyObject* fetch_span(PyObject*, PyObject* span) {
  return guarded([&]() -> PyObject* {
    if (Py_TYPE(span) != span_type) throw py::type_error("fetch takes a Span");
    return fetch(span_of(span)).release().ptr();
  });
}

PyGetSetDef span_getset[] = {{"start", get_span_start, nullptr, "First byte in its storage.", nullptr},
                             {"nbytes", get_nbytes, nullptr, "How many bytes.", nullptr},
                             {nullptr, nullptr, nullptr, nullptr, nullptr}};

PyType_Slot span_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(span_dealloc)},
                            {Py_tp_getset, span_getset},
                            {Py_tp_doc, const_cast<char*>("A stretch of a storage, moved to a store.")},
                            {0, nullptr}};
PyType_Spec span_spec = {"actckpt._C.Span", sizeof(SpanObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, span_slots};

PyMethodDef span_functions[] = {{"num_spans", num_spans, METH_NOARGS, "num_spans(): storages that have spans now."},
                                {"note_owned", note_owned_storage, METH_O, "note_owned(storage): never to be moved."},
                                {"share", share_span, METH_O, "share(span): one more saved tensor needs it."},
                                {"fetch", fetch_span, METH_O, "fetch(span) -> Bytes, for the backward under way."},
                                {nullptr, nullptr, 0, nullptr}};

}  // namespace

void Record::forget(std::size_t place) noexcept {
  spans[place] = nullptr;
  if (--num_alive > 0) return;
  // A session may go around a whole training: its lists begin anew.
  spans.clear();
  sizes.clear();
  task = -1;
}

py::object find_span(const TensorExtent& extent, std::vector<py::object>* overlapping) {
  const auto found = registry().find(extent.storage);
  if (found == registry().end()) return {};
  for (SpanObject* span : found->second) {
    if (!refers_to(extent.storage, span->storage_reference) || span->version != extent.version ||
        !refers_to(extent.root, span->root_reference)) {
      continue;
    }
    const long long end = extent.start + extent.nbytes, span_end = span->start + span->nbytes;
    auto held = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(span));
    if (span->start <= extent.start && end <= span_end && (extent.start - span->start) % extent.element_size == 0) {
      return held;
    }
    if (span->start < end && extent.start < span_end) overlapping->push_back(std::move(held));
  }
  return {};
}

py::object new_span(const TensorExtent& extent, PyObject* backend, const py::object& ticket, SourceWatchPointer watch,
                    PyObject* device, bool may_share) {
  SpanObject* span = PyObject_New(SpanObject, span_type);
  if (span == nullptr) throw_pending();
  span->backend = Py_NewRef(backend);
  span->ticket = ticket.inc_ref().ptr();
  span->device = Py_NewRef(device);
  span->nbytes_object = nullptr;
  span->storage_reference = nullptr;
  span->root_reference = nullptr;
  span->key = nullptr;
  span->start = extent.start;
  span->nbytes = extent.nbytes;
  span->version = extent.version;
  span->num_saved = 1;
  span->ahead_task = -1;
  span->ahead_bytes = 0;
  new (&span->record) std::shared_ptr<Record>();
  new (&span->watch) SourceWatchPointer(std::move(watch));
  span->place = 0;
  auto owner = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(span));
  span->nbytes_object = number(extent.nbytes).release().ptr();
  span->storage_reference = new_reference(extent.storage);
  span->root_reference = new_reference(extent.root);
  if (may_share) remember(span, extent.storage);
  return owner;
}

void share(SpanObject* span) {
  ++span->num_saved;
  call_method_with(span->backend, names().saved_again, span->ticket, span->device);
}

void note_owned(PyObject* storage) {
  if (is_known_owned(storage)) return;
  Owned& all = owned();
  all.references[storage] = py::reinterpret_steal<py::object>(new_reference(storage));
  if (all.references.size() < all.sweep_at) return;
  for (auto entry = all.references.begin(); entry != all.references.end();) {
    const bool lives = refers_to(entry->first, entry->second.ptr());
    entry = lives ? std::next(entry) : all.references.erase(entry);
  }
  all.sweep_at = std::max<std::size_t>(1024, 2 * all.references.size());
}

bool is_known_owned(PyObject* storage) {
  const auto found = owned().references.find(storage);
  return found != owned().references.end() && refers_to(storage, found->second.ptr());
}

void add_span_type(py::module_& module) {
  span_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&span_spec));
  if (span_type == nullptr) throw_pending();
  module.add_object("Span", reinterpret_cast<PyObject*>(span_type));
  if (PyModule_AddFunctions(module.ptr(), span_functions) < 0) throw_pending();
}

}  // namespace actckpt
