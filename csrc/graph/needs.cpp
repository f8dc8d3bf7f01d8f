#include "graph/needs.h"

#include <algorithm>
#include <limits>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/python.h"
#include "core/released.h"
#include "core/task_end.h"
#include "graph/lineage.h"
#include "graph/suspended_steps.h"

namespace actckpt::replay {
namespace {

ValueObject* value_in(PyObject* values, Py_ssize_t i) {
  return reinterpret_cast<ValueObject*>(PyList_GET_ITEM(values, i));
}

PyObject* inputs_of(const ValueObject* value) { return reinterpret_cast<StepObject*>(value->step)->inputs; }

void note_use(ValueObject* value, long long task, long long clock) noexcept {
  if (value->counted_task != task) {
    value->counted_task = task;
    value->num_readers = 0;
    value->is_reading = 0;
    value->first_use = std::numeric_limits<long long>::max();
    value->last_use = 0;
  }
  value->first_use = std::min(value->first_use, clock);
  value->last_use = std::max(value->last_use, clock);
}

// `value` must be replayed in backward `task`: its inputs are needed.
void start_reading(ValueObject* value, long long task) {
  std::vector<ValueObject*> pending = {value};
  while (!pending.empty()) {
    ValueObject* current = pending.back();
    pending.pop_back();
    if (current->is_reading != 0 || is_available(current) || is_none(current->step)) continue;
    current->is_reading = 1;
    PyObject* inputs = inputs_of(current);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); ++i) {
      ValueObject* input = value_in(inputs, i);
      note_use(input, task, current->ordinal);
      input->num_readers += 1;
      pending.push_back(input);
    }
  }
}

// Whether the bytes of a value can be restored after their release.
bool comes_back(const ValueObject* value) { return !is_none(value->step) || !is_none(value->stored); }

// Whether the cached bytes of a value may be released before its backward ends: a collective runs once per backward.
bool may_go(const ValueObject* value) { return comes_back(value) && value->is_repeated == 0; }

// Moves the cached bytes of a value into `gone`; its owner releases them once all counts are right.
void take_cached(ValueObject* value, std::vector<py::object>* gone) {
  if (is_none(value->cached)) return;
  unlist_cached(value);
  gone->push_back(py::reinterpret_steal<py::object>(std::exchange(value->cached, nullptr)));
}

// `value` need not be replayed any more in backward `task`; nor need its inputs, if only it read them.
void stop_reading(ValueObject* value, long long task, std::vector<py::object>* gone) {
  std::vector<ValueObject*> pending = {value};
  while (!pending.empty()) {
    ValueObject* current = pending.back();
    pending.pop_back();
    if (current->counted_task != task || current->is_reading == 0) continue;
    current->is_reading = 0;
    if (is_none(current->step)) continue;
    PyObject* inputs = inputs_of(current);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); ++i) {
      ValueObject* input = value_in(inputs, i);
      if (input->counted_task != task) continue;
      input->num_readers -= 1;
      if (is_asked(input, task)) continue;
      if (!comes_back(input)) continue;
      if (may_go(input)) take_cached(input, gone);
      pending.push_back(input);
    }
  }
}

// Whether bytes stay held only for `value`, or for others like it.
bool keeps_inputs(const ValueObject* value) {
  if (is_none(value->step)) return false;
  PyObject* inputs = inputs_of(value);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); ++i) {
    const ValueObject* input = value_in(inputs, i);
    if (input->is_input == 0 && (!is_none(input->held) || !is_none(input->stored))) return true;
  }
  return false;
}

// Lists that running backwards fill; their end callbacks own them.
std::unordered_set<CachedBytes*>& lists_in_use() {
  static auto* lists = new std::unordered_set<CachedBytes*>();
  return *lists;
}

// Strong references to the values in a list: releasing one may free others.
std::vector<py::object> values_in(const CachedBytes* cached) {
  std::vector<py::object> values;
  for (ValueObject* value : cached->values) {
    values.push_back(py::reinterpret_borrow<py::object>(as_object(value)));
  }
  return values;
}

// Backward `task` ended or failed: releases what was cached for it. A value that cannot be replayed any more (the
// backward covered only part of the graph) is held instead.
void end_task(CachedBytes* cached, long long task) {
  cached->tasks.erase(std::find(cached->tasks.begin(), cached->tasks.end(), task));
  if (cached->tasks.empty()) lists_in_use().erase(cached);
  std::vector<py::object> gone;
  for (const py::object& listed : values_in(cached)) {
    ValueObject* value = as_value(listed);
    if (value->cached_task != task) continue;
    const bool is_replayable = comes_back(value) || restore_step(value);
    if (is_none(value->cached)) continue;  // code run by the garbage collector released it
    if (!is_replayable) {
      assign(value->held, value->cached);
      value->version = value->cached_version;
    }
    take_cached(value, &gone);
  }
}

// Keeps a list alive while a backward may need it.
class CachedReference {
 public:
  explicit CachedReference(CachedBytes* cached) noexcept : cached_(cached) { cached_->references += 1; }
  CachedReference(const CachedReference& other) noexcept : CachedReference(other.cached_) {}
  CachedReference& operator=(const CachedReference&) = delete;
  ~CachedReference() noexcept { release(cached_); }
  CachedBytes* get() const noexcept { return cached_; }

 private:
  CachedBytes* cached_;
};

void await_end(CachedBytes* cached, long long task) {
  if (std::find(cached->tasks.begin(), cached->tasks.end(), task) != cached->tasks.end()) return;
  at_task_end(task, [held = CachedReference(cached), task](TaskResult) { end_task(held.get(), task); });
  cached->tasks.push_back(task);
  lists_in_use().insert(cached);
}

// release_replay_caches(nbytes) -> released bytes
long long release_replay_caches(const py::object& nbytes) {
  Released released(nbytes.ptr());
  std::vector<py::object> values;
  for (const CachedBytes* cached : lists_in_use()) {
    for (py::object& value : values_in(cached)) values.push_back(std::move(value));
  }
  for (const py::object& listed : values) {
    if (released.is_enough()) break;
    ValueObject* value = as_value(listed);
    if (value->is_repeated != 0 || (!comes_back(value) && !restore_step(value))) continue;
    if (is_none(value->cached)) continue;
    std::vector<py::object> tensors = {py::reinterpret_borrow<py::object>(value->cached)};
    evict(value, value->cached_task);
    released.free(std::move(tensors));
  }
  return released.nbytes();
}

}  // namespace

bool is_asked(ValueObject* value, long long task) noexcept {
  if (task == -1) return false;
  return is_pending(value, task) || (value->counted_task == task && value->num_readers > 0);
}

void count_needs(TapeObject* tape, long long task) {
  if (task == -1 || tape->counted_task == task) return;
  tape->counted_task = task;
  tape->window_bytes = -1;
  for (HandleObject* handle = tape->first_handle; handle != nullptr; handle = handle->next) {
    if (handle->task == task) continue;
    auto* value = reinterpret_cast<ValueObject*>(reinterpret_cast<WindowObject*>(handle->window)->value);
    note_use(value, task, handle->clock);
    start_reading(value, task);
  }
}

void cache(PyObject* tape, ValueObject* value, PyObject* tensor, long long task) {
  auto* core = reinterpret_cast<TapeObject*>(tape);
  long long version = 0;
  if (!read_version(tensor, &version)) return;  // inference tensor: nothing counts its changes
  if (core->cached == nullptr) {
    core->cached = new CachedBytes();
    core->cached->references = 1;
  }
  if (value->cached_in == nullptr) {
    value->cached_in = core->cached;
    value->cached_in->references += 1;
  }
  await_end(value->cached_in, task);
  std::vector<py::object> gone;
  take_cached(value, &gone);  // cached by another backward
  list_cached(value);
  Py_XSETREF(value->cached, Py_NewRef(tensor));
  value->cached_task = task;
  value->cached_version = version;
  stop_reading(value, task, &gone);
  if (core->is_open == 0 && core->repeats == 0 && keeps_inputs(value) && call(names().keeps_graph).ptr() == Py_False) {
    // This backward frees its graph. A kept value is then released with its last need, not with the node that saved a
    // value made from it. Not in an open region: it holds what it keeps, and must know what is made from a value that
    // is overwritten.
    park_step(value);
  }
}

void uncache(ValueObject* value) noexcept {
  std::vector<py::object> gone;
  take_cached(value, &gone);
}

void evict(ValueObject* value, long long task) {
  std::vector<py::object> gone;
  take_cached(value, &gone);
  if (!is_asked(value, task)) return;
  note_use(value, task, value->ordinal);
  start_reading(value, task);
}

void evict_leftovers(TapeObject* tape, long long task, long long clock) {
  if (tape->cached == nullptr) return;
  for (const py::object& listed : values_in(tape->cached)) {
    ValueObject* value = as_value(listed);
    if (value->cached_task == task && may_go(value) && value->first_use > clock) evict(value, task);
  }
}

void release_needs(ValueObject* value, long long task) noexcept {
  if (task == -1 || is_asked(value, task)) return;
  std::vector<py::object> gone;
  if (may_go(value)) take_cached(value, &gone);
  if (!is_available(value)) stop_reading(value, task, &gone);
}

void add_needs_functions(py::module_& module) {
  module.def("cache", [](const py::handle& tape, const py::handle& value, const py::handle& tensor, long long task) {
    cache(tape.ptr(), as_value(value), tensor.ptr(), task);
  });
  module.def("evict_leftovers", [](const py::handle& tape, long long task, long long clock) {
    evict_leftovers(as_tape(tape), task, clock);
  });
  module.def("release_replay_caches", release_replay_caches);
}

}  // namespace actckpt::replay
