#include "graph/objects.h"

#include <algorithm>
#include <new>
#include <utility>

#include "core/grad_mode.h"
#include "core/meter.h"
#include "core/python.h"
#include "core/reads.h"
#include "graph/geometry.h"

namespace actckpt::replay {

void assign(PyObject*& field, PyObject* object) noexcept {
  Py_XINCREF(object);
  PyObject* old = std::exchange(field, object);
  Py_XDECREF(old);
}

void append(PyObject* list, PyObject* item) {
  if (PyList_Append(list, item) != 0) throw py::error_already_set();
}

py::object new_value(long long nbytes, PyObject* device, long long ordinal) {
  auto* value = allocated<ValueObject>(value_type);
  value->nbytes = nbytes;
  value->ordinal = ordinal;
  value->version = value->cached_task = value->counted_task = value->repeated_task = -1;
  assign(value->device, device);
  return py::reinterpret_steal<py::object>(as_object(value));
}

py::object new_step(PyObject* op, Numerics which, py::object args, py::object kwargs, py::object inputs) {
  auto* step = allocated<StepObject>(step_type);
  auto result = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(step));
  assign(step->operator_, op);
  step->args = args.release().ptr();
  step->kwargs = kwargs.release().ptr();
  step->inputs = inputs.release().ptr();
  untracked(step->args);
  untracked(step->inputs);
  step->numerics = numerics_now(which).release().ptr();
  step->grad_enabled = is_grad_enabled();
  return result;
}

py::object new_known_storage(PyObject* storage, PyObject* value) {
  auto* known = allocated<KnownStorageObject>(known_storage_type);
  auto result = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(known));
  known->storage = untracked(PyWeakref_NewRef(storage, nullptr));
  if (known->storage == nullptr) throw py::error_already_set();
  assign(known->value, value);
  return result;
}

py::object new_handle(PyObject* tape, PyObject* window) {
  auto* handle = allocated<HandleObject>(handle_type);
  auto* core = reinterpret_cast<TapeObject*>(tape);
  handle->task = -1;
  handle->clock = core->num_values;
  assign(handle->tape, tape);
  assign(handle->window, window);
  handle->previous = core->last_handle;
  (core->last_handle == nullptr ? core->first_handle : core->last_handle->next) = handle;
  core->last_handle = handle;
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(handle));
}

void unlist(HandleObject* handle) noexcept {
  auto* tape = reinterpret_cast<TapeObject*>(handle->tape);
  (handle->previous == nullptr ? tape->first_handle : handle->previous->next) = handle->next;
  (handle->next == nullptr ? tape->last_handle : handle->next->previous) = handle->previous;
}

void release(CachedBytes* cached) noexcept {
  if (cached != nullptr && --cached->references == 0) delete cached;
}

void list_cached(ValueObject* value) {
  CachedBytes* cached = value->cached_in;
  value->cached_place = cached->values.size();
  cached->values.push_back(value);
  if (value->is_repeated == 0) cached->bytes += value->nbytes;  // results of collectives stay, whatever the window
}

void unlist_cached(ValueObject* value) noexcept {
  CachedBytes* cached = value->cached_in;
  ValueObject* last = cached->values.back();
  cached->values[value->cached_place] = last;
  last->cached_place = value->cached_place;
  cached->values.pop_back();
  if (value->is_repeated == 0) cached->bytes -= value->nbytes;
  if (cached->over_budget_entry == value) cached->over_budget_entry = nullptr;
}

EntryObject* add_entry(TapeObject* tape, ValueObject* value, PyObject* tensor) {
  const Names& n = names();
  auto* entry = allocated<EntryObject>(entry_type);
  const auto result = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(entry));
  PyObject* unnamed = value->is_input != 0 ? n.made_by_nothing : n.made_unseen;
  entry->operator_ =
      is_none(value->operator_) ? Py_NewRef(unnamed) : attribute(value->operator_, n.name).release().ptr();
  if (value->module != nullptr) {
    assign(entry->module, value->module);
    entry->call = value->call;
    entry->occurrence = value->occurrence;
    entry->result = value->result;
  } else {
    const auto key = py::reinterpret_steal<py::object>(PyLong_FromLongLong(value->key));
    assign(entry->module, PyDict_GetItem(tape->modules, key.ptr()));
    entry->occurrence = -1;
  }
  assign(entry->action, n.keep);
  assign(entry->why, n.no_reason);
  const py::object storage = reads().untyped_storage(tensor);
  if (value->is_input == 0) note_alive(tape->meter, storage.ptr());
  entry->storage = untracked(PyWeakref_NewRef(storage.ptr(), nullptr));
  if (entry->storage == nullptr) throw py::error_already_set();
  entry->nbytes = value->nbytes;
  if (PyList_Append(tape->entries, result.ptr()) != 0) throw py::error_already_set();
  assign(value->entry, result.ptr());
  return entry;
}

void add_output(StepObject* step, ValueObject* value, long kind, long index) {
  assign(value->step, reinterpret_cast<PyObject*>(step));
  if (step->outputs == nullptr) step->outputs = untracked(py::list().release().ptr());
  if (step->results == nullptr) step->results = new std::vector<std::pair<long, long>>();
  value->index = index;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(step->inputs); ++i) {
    const auto* input = reinterpret_cast<ValueObject*>(PyList_GET_ITEM(step->inputs, i));
    if (input->needs_collective != 0 && !is_none(input->step)) value->needs_collective = 1;
  }
  const auto reference = py::reinterpret_steal<py::object>(untracked(PyWeakref_NewRef(as_object(value), nullptr)));
  if (!reference || PyList_Append(step->outputs, reference.ptr()) != 0) throw py::error_already_set();
  step->results->emplace_back(kind, index);
}

PyObject* referent(PyObject* reference) noexcept {
#if PY_VERSION_HEX >= 0x030d0000
  PyObject* found = nullptr;
  if (PyWeakref_GetRef(reference, &found) < 0) PyErr_Clear();
  Py_XDECREF(found);  // somebody else holds it, or it is dead
  return found;
#else
  PyObject* found = PyWeakref_GET_OBJECT(reference);
  return found == Py_None ? nullptr : found;
#endif
}

void add_handle(ValueObject* value, PyObject* handle) {
  auto* added = reinterpret_cast<HandleObject*>(handle);
  forget_handle(added);
  Handles& handles = value->handles;
  const int room = handles.many != nullptr ? handles.room : 2;
  if (handles.size == room) {
    auto* more = static_cast<HandleObject**>(PyMem_Malloc(2 * room * sizeof(HandleObject*)));
    if (more == nullptr) throw std::bad_alloc();
    std::copy(handles.begin(), handles.end(), more);
    PyMem_Free(handles.many);
    handles.many = more;
    handles.room = 2 * room;
  }
  *handles.end() = added;
  handles.size += 1;
  added->listed_on = value;
  value->was_saved = 1;
}

void forget_handle(HandleObject* handle) noexcept {
  ValueObject* value = std::exchange(handle->listed_on, nullptr);
  if (value == nullptr) return;
  for (HandleObject*& listed : value->handles) {
    if (listed == handle) listed = nullptr;
  }
}

bool has_saved_tensors(ValueObject* value) noexcept {
  return std::any_of(value->handles.begin(), value->handles.end(),
                     [](const HandleObject* handle) { return handle != nullptr; });
}

bool is_pending(ValueObject* value, long long task) noexcept {
  return std::any_of(value->handles.begin(), value->handles.end(),
                     [&](const HandleObject* handle) { return handle != nullptr && handle->task != task; });
}

}  // namespace actckpt::replay
