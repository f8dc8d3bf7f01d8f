#include "offload/reading.h"

#include <algorithm>
#include <new>
#include <numeric>
#include <unordered_set>
#include <utility>

#include "core/meter.h"
#include "offload/bytes.h"
#include "offload/orders.h"

namespace actckpt {
namespace {

using RecordPointer = std::shared_ptr<Record>;

// Spans looked at per unpack; keeps the time of an unpack bounded.
constexpr int kMaxLooks = 64;

// What is read ahead and nobody asked for yet; one window for the process.
struct {
  std::unordered_set<SpanObject*> spans;  // borrowed
  long long bytes = 0;
  long long limit = 0;  // the setting, as the last backward that began found it
} window;

// What this thread moved last.
std::weak_ptr<Record>& last_record() {
  thread_local std::weak_ptr<Record> record;
  return record;
}

// Begins to bring `span` back if there is room; returns whether there was.
bool read_ahead(SpanObject* span, long long task) {
  if (span->ahead_task != -1) return true;
  if (window.bytes + span->nbytes > window.limit) return false;
  const auto held = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(span));
  window.spans.insert(span);
  window.bytes += span->nbytes;
  span->ahead_task = task;
  span->ahead_bytes = span->nbytes;
  try {
    const py::object began = span->ticket->prefetch();
    // None: the source is still held, and stays until the span is unloaded. It needs no room.
    if (began.is_none()) {
      window.bytes -= std::exchange(span->ahead_bytes, 0);
    } else if (span->record != nullptr) {
      note_alive(span->record->meter.ptr(), storage_behind(began.ptr()));
    }
  } catch (...) {
    leave_window(span);
    throw;
  }
  return true;
}

// Releases what `task` read ahead in vain.
void release_unread(long long task) {
  std::vector<py::object> unread;
  for (SpanObject* span : window.spans) {
    if (span->ahead_task == task) {
      unread.push_back(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(span)));
    }
  }
  for (const py::object& span : unread) {
    leave_window(span_of(span.ptr()));
    span_of(span.ptr())->ticket->unload();
  }
}

// The backward `task` has ended, or failed.
void end_task(Record* record, long long task) {
  release_unread(task);
  if (record->task != task) return;
  record->task = -1;
  std::vector<py::object> kept;
  for (SpanObject* span : record->spans) {
    if (span != nullptr && span->num_saved > 1) {
      kept.push_back(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(span)));
    }
  }
  if (record->seen.size() == record->sizes.size() && !record->seen.empty()) note_order(record->sizes, record->seen);
  for (const py::object& span : kept) span_of(span.ptr())->ticket->unload();
}

// Given to autograd, which calls it when the backward ends, and drops it uncalled when it fails.
struct EndObject {
  PyObject_HEAD RecordPointer record;
  long long task;
};

PyTypeObject* end_type = nullptr;

EndObject* end_of(PyObject* self) { return reinterpret_cast<EndObject*>(self); }

PyObject* end_call(PyObject* self, PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    const RecordPointer record = std::move(end_of(self)->record);
    if (record != nullptr) end_task(record.get(), end_of(self)->task);
    Py_RETURN_NONE;
  });
}

void end_dealloc(PyObject* self) {
  {
    py::error_scope pending;  // this runs while the engine unwinds from a failed backward
    PyObject* result = end_call(self, nullptr, nullptr);
    if (result == nullptr) PyErr_WriteUnraisable(nullptr);
    Py_XDECREF(result);
  }
  end_of(self)->record.~RecordPointer();
  PyTypeObject* type = Py_TYPE(self);
  PyObject_Free(self);
  Py_DECREF(type);
}

void tell_end(const RecordPointer& record, long long task) {
  record->will_be_told = true;
  if (names().queue_callback == nullptr) return;
  EndObject* end = PyObject_New(EndObject, end_type);
  if (end == nullptr) throw_pending();
  new (&end->record) RecordPointer(record);
  end->task = task;
  const auto owner = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(end));
  call(names().queue_callback, owner.ptr());
}

// Gets ready for a backward that has not come to this record yet.
void prepare(Record* record, long long task) {
  if (record->task == task) return;
  const std::size_t count = record->sizes.size();
  record->task = task;
  record->will_be_told = false;
  record->cursor = 0;
  record->seen.clear();
  record->is_seen.assign(count, false);
  if (const std::vector<std::size_t>* learnt = learnt_order(record->sizes)) {
    record->order = *learnt;
  } else {
    record->order.resize(count);
    std::iota(record->order.rbegin(), record->order.rend(), std::size_t{0});
  }
  record->rank.resize(count);
  for (std::size_t i = 0; i < count; ++i) record->rank[record->order[i]] = i;
}

// Reads ahead in one record from its cursor on; returns whether there is room for more.
bool advance(Record* record, long long task, int* looks) {
  while (record->task == task && record->cursor < record->order.size()) {
    if (--*looks < 0) return false;
    const std::size_t place = record->order[record->cursor];
    SpanObject* span = place < record->spans.size() ? record->spans[place] : nullptr;
    const bool is_wanted = span != nullptr && !record->is_seen[place];
    if (is_wanted && !read_ahead(span, task)) return false;
    ++record->cursor;
  }
  return true;
}

// Begins to bring back what comes next here, then what earlier sessions moved (Rule 1).
void read_on(RecordPointer record, long long task) {
  int looks = kMaxLooks;
  // Records that take turns may each be the previous one of the other: looks end that.
  while (record != nullptr && --looks >= 0 && advance(record.get(), task, &looks)) {
    record = record->previous.lock();
    if (record != nullptr) prepare(record.get(), task);
  }
}

void note_seen(const RecordPointer& record, std::size_t place, long long task) {
  if (record->task != task || place >= record->is_seen.size()) return;  // moved since it was prepared
  if (!record->is_seen[place]) record->seen.push_back(place);
  record->is_seen[place] = true;
  record->cursor = std::max(record->cursor, record->rank[place] + 1);
}

py::object fetch_once(SpanObject* span) {
  py::object found = span->ticket->fetch();
  // What was read while its memory was replaced is worthless; the storage has the bytes.
  if (PyObject* storage = span->watch->replaced_storage()) return new_bytes(storage, span->start);
  return found;
}

// A backward has come to `record`.
void arrive(const RecordPointer& record, long long task) {
  if (record->task != task) window.limit = PyLong_AsLongLong(call(names().max_inflight).ptr());
  prepare(record.get(), task);
  if (!record->will_be_told) tell_end(record, task);
}

long long current_task() {
  const long long task = PyLong_AsLongLong(call(names().graph_task_id).ptr());
  if (task == -1 && PyErr_Occurred() != nullptr) throw_pending();
  return task;
}

PyObject* offload_sums(PyObject*, PyObject*) {
  const Sums& s = sums();
  return Py_BuildValue("{s:L,s:L,s:L,s:L}", "offloaded_bytes", s.offloaded_bytes, "reloaded_bytes", s.reloaded_bytes,
                       "deduplicated_bytes", s.deduplicated_bytes, "kept_small", s.kept_small);
}

PyType_Slot slots[] = {{Py_tp_call, reinterpret_cast<void*>(end_call)},
                       {Py_tp_dealloc, reinterpret_cast<void*>(end_dealloc)},
                       {0, nullptr}};
PyType_Spec spec = {"actckpt._C.BackwardEnd", sizeof(EndObject), 0,
                    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, slots};

PyMethodDef functions[] = {{"offload_sums", offload_sums, METH_NOARGS, "offload_sums() -> dict of bytes and counts."},
                           {nullptr, nullptr, 0, nullptr}};

}  // namespace

Sums& sums() {
  static Sums all;
  return all;
}

void leave_window(SpanObject* span) noexcept {
  if (span->ahead_task == -1) return;
  span->ahead_task = -1;
  window.spans.erase(span);
  window.bytes -= std::exchange(span->ahead_bytes, 0);
}

void note_moved(const RecordPointer& record, SpanObject* span) {
  sums().offloaded_bytes += span->nbytes;
  if (record->num_alive == 0) {
    const RecordPointer last = last_record().lock();
    if (last != record) {
      record->previous = last;
      last_record() = record;
    }
  }
  span->record = record;
  span->place = record->spans.size();
  record->spans.push_back(span);
  record->sizes.push_back(span->nbytes);
  ++record->num_alive;
  ++record->num_moved;
  record->moved_bytes += span->nbytes;
}

py::object fetch(SpanObject* span) {
  const auto held = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(span));
  const long long task = current_task();
  py::object found = fetch_once(span);
  if (!holds(found.ptr(), span->nbytes)) {  // the source, still held, or what was brought back: its memory was freed
    span->ticket->unload();
    found = fetch_once(span);
  }
  sums().reloaded_bytes += span->nbytes;
  leave_window(span);
  const RecordPointer record = span->record;
  if (record != nullptr) note_alive(record->meter.ptr(), storage_behind(found.ptr()));
  if (task != -1 && record != nullptr) {
    arrive(record, task);
    note_seen(record, span->place, task);
    read_on(record, task);
  }
  if (span->num_saved == 1 || task == -1) span->ticket->unload();
  return found;
}

void read_ahead_of(const RecordPointer& record) {
  const long long task = current_task();
  if (task == -1) return;
  arrive(record, task);
  read_on(record, task);
}

std::shared_ptr<Record> last_moved() { return last_record().lock(); }

void add_reading_functions(py::module_& module) {
  end_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
  if (end_type == nullptr) throw_pending();
  if (PyModule_AddFunctions(module.ptr(), functions) < 0) throw_pending();
}

}  // namespace actckpt
