#include "offload/span.h"

#include <algorithm>
#include <new>
#include <unordered_map>
#include <utility>

#include "offload/owned_memory.h"
#include "offload/reading.h"

namespace actckpt {

namespace {

PyTypeObject* span_type = nullptr;

using Spans = std::vector<SpanObject*>;

// By identity of their storage, confirmed by their weak references: addresses are reused.
std::unordered_map<PyObject*, Spans>& registry() {
  static auto* all = new std::unordered_map<PyObject*, Spans>();
  return *all;
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
  py::error_scope pending;  // ending a ticket releases references, which may run any code
  using TicketPointer = std::unique_ptr<StoreTicket>;
  span->ticket.~TicketPointer();
  Py_DECREF(span->store);
  Py_XDECREF(span->storage_reference);
  Py_XDECREF(span->root_reference);
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

// end_sharing(storage)
PyObject* end_sharing(PyObject*, PyObject* storage) {
  const auto found = registry().find(storage);
  if (found == registry().end()) Py_RETURN_NONE;
  for (SpanObject* span : found->second) span->key = nullptr;
  registry().erase(found);
  Py_RETURN_NONE;
}

PyObject* num_spans(PyObject*, PyObject*) { return PyLong_FromSize_t(registry().size()); }

PyType_Slot span_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(span_dealloc)},
                            {Py_tp_doc, const_cast<char*>("A stretch of a storage, moved to a store.")},
                            {0, nullptr}};
PyType_Spec span_spec = {"actckpt._C.Span", sizeof(SpanObject), 0,
                         Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, span_slots};

PyMethodDef span_functions[] = {
    {"num_spans", num_spans, METH_NOARGS, "num_spans(): storages that have spans now."},
    {"end_sharing", end_sharing, METH_O, "end_sharing(storage): what is saved in it from now on is moved anew."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

void Record::forget(std::size_t place) noexcept {
  spans[place] = nullptr;
  if (--num_alive > 0) return;
  // A session may last a whole training: start its lists anew.
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

Placed Placed::in(py::object span) {
  Placed placed;
  if (!span) return placed;
  placed.start = span_of(span.ptr())->start;
  placed.nbytes = span_of(span.ptr())->nbytes;
  placed.spans.push_back(std::move(span));
  return placed;
}

py::object new_span(const TensorExtent& extent, PyObject* store, std::unique_ptr<StoreTicket> ticket,
                    SourceWatchPointer watch, bool may_share) {
  SpanObject* span = PyObject_New(SpanObject, span_type);
  if (span == nullptr) throw_pending();
  span->store = Py_NewRef(store);
  new (&span->ticket) std::unique_ptr<StoreTicket>(std::move(ticket));
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
  span->storage_reference = new_reference(extent.storage);
  span->root_reference = new_reference(extent.root);
  if (may_share) remember(span, extent.storage);
  return owner;
}

void share(SpanObject* span, PyObject* storage) {
  ++span->num_saved;
  span->ticket->saved_again(storage);
}

void add_span_type(py::module_& module) {
  span_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&span_spec));
  if (span_type == nullptr) throw_pending();
  if (PyModule_AddFunctions(module.ptr(), span_functions) < 0) throw_pending();
}

}  // namespace actckpt
