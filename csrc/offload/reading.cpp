#include "offload/reading.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "core/meter.h"
#include "core/released.h"
#include "core/task_end.h"
#include "offload/bytes.h"
#include "offload/orders.h"

namespace actckpt {
namespace {

using RecordPointer = std::shared_ptr<Record>;

// Maximum number of spans examined per unpack; bounds the time of an unpack.
constexpr int kMaxLooks = 64;

// Prefetched spans that were not unpacked yet; one window for the process.
struct {
  std::unordered_set<SpanObject*> spans;  // borrowed
  long long bytes = 0;
  long long limit = 0;  // the setting when the last backward started
  // Under the windows of a plan: the running backward, and the bytes that its current block itself offloaded and did
  // not unpack yet. They have their own room, which is part of the limit.
  long long planned_task = -1;
  long long own = 0;
} window;

// Spans loaded for one saved tensor and needed by others, each with a weak reference to the storage; borrowed.
std::unordered_map<SpanObject*, py::object> shared_reloads;

// The record of this thread that offloaded last.
std::weak_ptr<Record>& last_record() {
  thread_local std::weak_ptr<Record> record;
  return record;
}

// Unloading a span may run Python code, which may free others: hold the ones that follow.
py::object held(SpanObject* span) { return py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(span)); }

void unload(SpanObject* span) { span->ticket->unload(); }

// Unloads span after span, even if some raise; `finish` throws the first error.
class Unloading {
 public:
  void add(SpanObject* span) {
    try {
      unload(span);
    } catch (py::error_already_set& error) {
      if (!first_) first_.emplace(error);
    }
  }
  void finish() const {
    if (first_) throw py::error_already_set(*first_);
  }

 private:
  std::optional<py::error_already_set> first_;
};

// Starts to load `span` if there is room; returns whether there was.
bool read_ahead(SpanObject* span, long long task) {
  if (span->ahead_task != -1) return true;
  if (window.bytes + span->nbytes > window.limit) return false;
  const py::object owner = held(span);
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
    if (span->ahead_task != task) unload(span);  // another thread released it meanwhile
  } catch (...) {
    leave_window(span);
    throw;
  }
  return true;
}

// The current block of `task` unpacked `nbytes` of its own: they now count as in use.
void leave_own_room(long long nbytes, long long task) {
  if (window.planned_task != task) return;
  const long long asked = std::min(window.own, nbytes);
  window.own -= asked;
  window.limit -= asked;
}

// Releases what `task` prefetched without unpacking it.
void release_unread(long long task, Unloading* unloading) {
  std::vector<py::object> unread;
  for (SpanObject* span : window.spans) {
    if (span->ahead_task == task) unread.push_back(held(span));
  }
  for (const py::object& span : unread) {
    leave_window(span_of(span.ptr()));
    unloading->add(span_of(span.ptr()));
  }
}

// release_read_ahead(nbytes) -> released bytes, including those that are free once their copies end
PyObject* release_read_ahead(PyObject*, PyObject* wanted) {
  return guarded([&]() -> PyObject* {
    Released released(wanted);
    std::vector<py::object> spans;
    for (SpanObject* span : window.spans) spans.push_back(held(span));
    for (const py::object& object : spans) {
      if (released.is_enough()) break;
      SpanObject* span = span_of(object.ptr());
      if (span->ahead_task == -1) continue;
      released.add(span->ahead_bytes);
      leave_window(span);
      unload(span);
    }
    return PyLong_FromLongLong(released.nbytes());
  });
}

// read_ahead_bytes() -> bytes
PyObject* read_ahead_bytes(PyObject*, PyObject*) { return PyLong_FromLongLong(window.bytes); }

// release_reloads(nbytes) -> released bytes
PyObject* release_reloads(PyObject*, PyObject* wanted) {
  return guarded([&]() -> PyObject* {
    Released released(wanted);
    std::vector<py::object> spans;
    for (const auto& [span, _] : shared_reloads) spans.push_back(held(span));
    for (const py::object& object : spans) {
      if (released.is_enough()) break;
      SpanObject* span = span_of(object.ptr());
      const auto found = shared_reloads.find(span);
      if (found == shared_reloads.end()) continue;
      const py::object storage = std::move(found->second);
      shared_reloads.erase(found);
      unload(span);
      if (call(storage.ptr()).is_none()) released.add(span->nbytes);
    }
    return PyLong_FromLongLong(released.nbytes());
  });
}

// Releases the bytes that a backward over `record` kept for saved tensors that share them.
void release_shared(const Record* record, Unloading* unloading) {
  std::vector<py::object> kept;
  for (SpanObject* span : record->spans) {
    if (span != nullptr && span->num_saved > 1) kept.push_back(held(span));
  }
  for (const py::object& span : kept) {
    shared_reloads.erase(span_of(span.ptr()));
    unloading->add(span_of(span.ptr()));
  }
}

// Backward `task` ended or failed.
void end_task(Record* record, long long task) {
  Unloading unloading;
  release_unread(task, &unloading);
  if (record->task == task) {
    record->task = -1;
    release_shared(record, &unloading);
  }
  unloading.finish();
}

void tell_end(const RecordPointer& record, long long task) {
  at_task_end(task, [record, task](TaskResult) { end_task(record.get(), task); });
  record->will_be_told = true;
}

// Prepares a backward that reaches this record for the first time.
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

// Prefetches in one record from its cursor on; returns whether there is room for more.
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

// Prefetches what comes next in this record, then the spans of earlier sessions.
void read_on(RecordPointer record, long long task) {
  int looks = kMaxLooks;
  // Records that alternate may each be the previous one of the other: the limit on looks ends that.
  while (record != nullptr && --looks >= 0 && advance(record.get(), task, &looks)) {
    record = record->previous.lock();
    if (record != nullptr) prepare(record.get(), task);
  }
}

void note_seen(const RecordPointer& record, std::size_t place, long long task) {
  if (record->task != task || place >= record->is_seen.size()) return;  // offloaded after the preparation
  if (record->is_seen[place]) return;
  record->seen.push_back(place);
  record->is_seen[place] = true;
  record->cursor = std::max(record->cursor, record->rank[place] + 1);
  if (record->seen.size() < record->sizes.size()) return;
  // Recorded now, since the spans may be gone before the backward ends.
  note_order(record->sizes, record->seen);
}

py::object fetch_once(SpanObject* span) {
  py::object found = span->ticket->fetch();
  if (span->watch->is_replaced()) raise(call(names().replaced_error, number(span->nbytes).ptr()));
  return found;
}

void limit_window() { window.limit = PyLong_AsLongLong(call(names().max_inflight).ptr()); }

// A backward reached `record`.
void arrive(const RecordPointer& record, long long task) {
  if (record->task != task && window.planned_task != task) limit_window();
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

PyMethodDef reading_functions[] = {
    {"offload_sums", offload_sums, METH_NOARGS, "offload_sums() -> dict of bytes and counts."},
    {"release_read_ahead", release_read_ahead, METH_O,
     "release_read_ahead(nbytes) -> released bytes of what was read ahead."},
    {"read_ahead_bytes", read_ahead_bytes, METH_NOARGS,
     "read_ahead_bytes() -> bytes that were read ahead and nobody asked for yet."},
    {"release_reloads", release_reloads, METH_O,
     "release_reloads(nbytes) -> released bytes of what waits for other saved tensors."},
    {nullptr, nullptr, 0, nullptr}};

// The record that offloaded last at some moment of a forward; borrowed.
struct Moved {
  std::weak_ptr<Record> record;

  // A backward reached what was computed at that moment: starts to prefetch, within the current window. Of that, `own`
  // bytes are for what the block itself offloaded.
  void read_ahead(long long own) const {
    const RecordPointer found = record.lock();
    if (found == nullptr) return;
    limit_window();
    const long long task = current_task();
    window.planned_task = task;
    window.own = own;
    if (task == -1) return;
    arrive(found, task);
    read_on(found, task);
  }
};

}  // namespace

Sums& sums() {
  static Sums all;
  return all;
}

void leave_window(SpanObject* span) noexcept {
  shared_reloads.erase(span);
  if (span->ahead_task == -1) return;
  span->ahead_task = -1;
  window.spans.erase(span);
  window.bytes -= std::exchange(span->ahead_bytes, 0);
}

void note_moved(const RecordPointer& record, SpanObject* span) {
  sums().offloaded_bytes += span->nbytes;
  if (record->num_alive == 0 && record->is_needed) {
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
  const py::object owner = held(span);
  const long long task = current_task();
  py::object found = fetch_once(span);
  if (!holds(found.ptr(), span->nbytes)) {  // the memory of the source, or of the loaded bytes, was freed
    unload(span);
    found = fetch_once(span);
  }
  sums().reloaded_bytes += span->nbytes;
  leave_window(span);
  leave_own_room(span->nbytes, task);
  const RecordPointer record = span->record;
  if (record != nullptr) note_alive(record->meter.ptr(), storage_behind(found.ptr()));
  if (task != -1 && record != nullptr && record->is_needed) {
    arrive(record, task);
    note_seen(record, span->place, task);
    read_on(record, task);
  }
  if (span->num_saved == 1 || task == -1) {
    unload(span);
  } else {
    PyObject* storage = PyWeakref_NewRef(storage_behind(found.ptr()), nullptr);
    if (storage == nullptr) throw_pending();
    shared_reloads[span] = py::reinterpret_steal<py::object>(storage);
  }
  return found;
}

std::shared_ptr<Record> last_moved() { return last_record().lock(); }

void add_reading_functions(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), reading_functions) < 0) throw_pending();
  py::class_<Moved>(module, "LastMoved")
      .def(py::init([] { return Moved{last_record()}; }))
      .def("read_ahead", &Moved::read_ahead, py::arg("own_bytes"));
}

}  // namespace actckpt
