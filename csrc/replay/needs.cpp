#include "replay/needs.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "core/python.h"
#include "replay/geometry.h"
#include "replay/lineage.h"

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

// Notes that `value` must be replayed in the backward `task`: what it is made from is needed.
void start_reading(ValueObject* value, long long task) {
  std::vector<ValueObject*> pending = {value};
  while (!pending.empty()) {
    ValueObject* current = pending.back();
    pending.pop_back();
    if (current->is_reading != 0 || is_at_hand(current) || is_none(current->step)) continue;
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

// Whether the bytes of a value can be had once they are let go of.
bool comes_back(const ValueObject* value) { return !is_none(value->step) || !is_none(value->stored); }

// Takes what is cached for a value into `gone`: whoever owns that lets go of it once all counts are right.
void take_cached(ValueObject* value, std::vector<py::object>* gone) {
  if (is_none(value->cached)) return;
  value->cached_in->bytes -= value->nbytes;
  gone->push_back(py::reinterpret_steal<py::object>(std::exchange(value->cached, nullptr)));
}

// Notes that `value` need not be replayed any more in the backward `task`; nor, then, what only it was to read.
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
      take_cached(input, gone);
      pending.push_back(input);
    }
  }
}

// Whether bytes stay held on account of `value` alone, or of others like it.
bool keeps_inputs(const ValueObject* value) {
  if (is_none(value->step)) return false;
  PyObject* inputs = inputs_of(value);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); ++i) {
    const ValueObject* input = value_in(inputs, i);
    if (input->is_input == 0 && (!is_none(input->held) || !is_none(input->stored))) return true;
  }
  return false;
}

ValueObject* value_of(const py::handle& value) { return reinterpret_cast<ValueObject*>(value.ptr()); }

}  // namespace

bool is_asked(ValueObject* value, long long task) noexcept {
  return is_pending(value, task) || (value->counted_task == task && value->num_readers > 0);
}

void count_needs(TapeObject* tape, long long task) {
  if (task == -1 || tape->counted_task == task) return;
  tape->counted_task = task;
  if (tape->window_follows != 0) tape->window_bytes = -1;
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
  if (!read_version(tensor, &version)) return;  // made in inference mode: nobody would tell if that changes it
  if (core->cached == nullptr) core->cached = new CachedBytes{1, 0};
  std::vector<py::object> gone;
  take_cached(value, &gone);  // by another backward
  if (value->cached_in == nullptr) {
    value->cached_in = core->cached;
    value->cached_in->references += 1;
  }
  Py_XSETREF(value->cached, Py_NewRef(tensor));
  value->cached_in->bytes += value->nbytes;
  value->cached_task = task;
  value->cached_version = version;
  stop_reading(value, task, &gone);
  if (keeps_inputs(value) && call(names().keeps_graph).ptr() == Py_False) {
    // The graph goes with this backward. A kept value then goes with its last need, not with the node that saved what
    // was made from it.
    assign(value->step, nullptr);
  }
  const auto number = py::reinterpret_steal<py::object>(PyLong_FromLongLong(task));
  PyObject* done =
      PyObject_CallMethodObjArgs(tape, names().clear_after, number.ptr(), reinterpret_cast<PyObject*>(value), nullptr);
  if (done == nullptr) throw py::error_already_set();
  Py_DECREF(done);
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

void let_go_of_needs(ValueObject* value, long long task) noexcept {
  if (task == -1 || is_asked(value, task)) return;
  std::vector<py::object> gone;
  if (comes_back(value)) take_cached(value, &gone);
  if (!is_at_hand(value)) stop_reading(value, task, &gone);
}

void add_needs_functions(py::module_& module) {
  module.def("count_needs", [](const py::handle& tape, long long task) {
    count_needs(reinterpret_cast<TapeObject*>(tape.ptr()), task);
  });
  module.def("is_pending", [](const py::handle& value, long long task) { return is_pending(value_of(value), task); });
  module.def("is_asked", [](const py::handle& value, long long task) { return is_asked(value_of(value), task); });
  module.def("cache", [](const py::handle& tape, const py::handle& value, const py::handle& tensor, long long task) {
    cache(tape.ptr(), value_of(value), tensor.ptr(), task);
  });
  module.def("uncache", [](const py::handle& value) { uncache(value_of(value)); });
  module.def("evict", [](const py::handle& value, long long task) { evict(value_of(value), task); });
  module.def("let_go_of_needs",
             [](const py::handle& value, long long task) { let_go_of_needs(value_of(value), task); });
}

}  // namespace actckpt::replay
