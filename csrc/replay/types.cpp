// The Python types of the objects in objects.h: what they look like from Python, and how they go.
#include "replay/objects.h"

#include "core/python.h"
#include "replay/geometry.h"
#include "replay/needs.h"

#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

namespace actckpt::replay {

PyTypeObject* value_type = nullptr;
PyTypeObject* step_type = nullptr;
PyTypeObject* block_type = nullptr;
PyTypeObject* window_type = nullptr;
PyTypeObject* handle_type = nullptr;
PyTypeObject* entry_type = nullptr;
PyTypeObject* tape_type = nullptr;

namespace {

// Values lead to steps and steps to values: a long program would free itself recursively and overflow the
// stack. Beyond some depth, what is to be freed is set aside and freed by the outermost call.
thread_local int free_depth = 0;
thread_local std::vector<PyObject*>* set_aside = nullptr;
constexpr int kMaxFreeDepth = 40;

class FreeScope {
 public:
  FreeScope() noexcept { free_depth += 1; }
  ~FreeScope() noexcept {
    free_depth -= 1;
    if (free_depth > 0 || set_aside == nullptr) return;
    while (!set_aside->empty()) {
      PyObject* next = set_aside->back();
      set_aside->pop_back();
      Py_DECREF(next);
    }
  }
  FreeScope(const FreeScope&) = delete;
  FreeScope& operator=(const FreeScope&) = delete;
};

void let_go(PyObject*& field) noexcept {
  PyObject* object = std::exchange(field, nullptr);
  if (object == nullptr) return;
  if (free_depth <= kMaxFreeDepth || Py_REFCNT(object) > 1) {
    Py_DECREF(object);
    return;
  }
  if (set_aside == nullptr) set_aside = new std::vector<PyObject*>();
  set_aside->push_back(object);
}

template <typename Object, typename... Fields>
void free_object(PyObject* self, Fields Object::*... fields) noexcept {
  py::error_scope pending;
  PyTypeObject* type = Py_TYPE(self);
  {
    FreeScope scope;
    auto* object = reinterpret_cast<Object*>(self);
    (let_go(object->*fields), ...);
    type->tp_free(self);
  }
  Py_DECREF(type);
}

void value_dealloc(PyObject* self) {
  auto* value = reinterpret_cast<ValueObject*>(self);
  if (value->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  for (HandleObject* handle : value->handles) {
    if (handle != nullptr) handle->listed_on = nullptr;
  }
  PyMem_Free(value->handles.many);
  if (!is_none(value->cached)) unlist_cached(value);
  release(value->cached_in);
  using V = ValueObject;
  free_object<V>(self, &V::device, &V::operator_, &V::action, &V::asked, &V::held, &V::root, &V::stored, &V::cached,
                 &V::spare, &V::why_opaque, &V::entry, &V::module, &V::parked, &V::step);
}

void step_dealloc(PyObject* self) {
  using S = StepObject;
  delete reinterpret_cast<S*>(self)->results;
  free_object<S>(self, &S::operator_, &S::random, &S::numerics, &S::outputs, &S::kwargs, &S::args, &S::written,
                 &S::inputs);
}

void block_dealloc(PyObject* self) { free_object<BlockObject>(self, &BlockObject::storage, &BlockObject::value); }

void window_dealloc(PyObject* self) {
  using W = WindowObject;
  PyMem_Free(reinterpret_cast<W*>(self)->dims);
  free_object<W>(self, &W::dtype, &W::value);
}

void handle_dealloc(PyObject* self) {
  py::error_scope pending;
  auto* handle = reinterpret_cast<HandleObject*>(self);
  if (handle->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  ValueObject* value = handle->listed_on;
  forget_handle(handle);
  if (value != nullptr) let_go_of_needs(value, value->counted_task);
  unlist(handle);
  delete std::exchange(handle->original, nullptr);
  using H = HandleObject;
  free_object<H>(self, &H::audit, &H::alias, &H::window, &H::tape);
}

void entry_dealloc(PyObject* self) {
  using E = EntryObject;
  free_object<E>(self, &E::operator_, &E::module, &E::action, &E::why, &E::storage);
}

void tape_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  release(reinterpret_cast<TapeObject*>(self)->cached);
  using T = TapeObject;
  free_object<T>(self, &T::blocks, &T::holding, &T::saved, &T::choice, &T::modules, &T::opaque_places,
                 &T::audited_places, &T::opaque_names, &T::entries, &T::outer, &T::candidates, &T::calls,
                 &T::why_untold, &T::why_opaque, &T::meter);
}

int tape_traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  auto* tape = reinterpret_cast<TapeObject*>(self);
  Py_VISIT(tape->blocks);
  Py_VISIT(tape->holding);
  Py_VISIT(tape->saved);
  Py_VISIT(tape->choice);
  Py_VISIT(tape->entries);
  Py_VISIT(tape->outer);
  Py_VISIT(tape->candidates);
  return 0;
}

int tape_clear(PyObject* self) {
  auto* tape = reinterpret_cast<TapeObject*>(self);
  Py_CLEAR(tape->blocks);
  Py_CLEAR(tape->holding);
  Py_CLEAR(tape->saved);
  Py_CLEAR(tape->choice);
  Py_CLEAR(tape->entries);
  Py_CLEAR(tape->outer);
  Py_CLEAR(tape->candidates);
  return 0;
}

PyObject* value_new(PyTypeObject* type, PyObject* args, PyObject*) {
  long long nbytes, ordinal;
  PyObject* device;
  if (type != value_type || PyArg_ParseTuple(args, "LOL", &nbytes, &device, &ordinal) == 0) return nullptr;
  return guarded([&] { return new_value(nbytes, device, ordinal).release().ptr(); });
}

PyObject* step_new(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *op, *frozen, *kwargs, *inputs;
  if (PyArg_ParseTuple(args, "OOOO", &op, &frozen, &kwargs, &inputs) == 0) return nullptr;
  return guarded([&] {
    const auto held = [](PyObject* object) { return py::reinterpret_borrow<py::object>(object); };
    const auto which = is_true(op, names().is_elementwise) ? Numerics::kOfElements : Numerics::kAll;
    return new_step(op, which, held(frozen), held(kwargs), held(inputs)).release().ptr();
  });
}

PyObject* block_new(PyTypeObject*, PyObject* args, PyObject*) {
  PyObject *storage, *value;
  if (PyArg_ParseTuple(args, "OO", &storage, &value) == 0) return nullptr;
  return guarded([&] { return new_block(storage, value).release().ptr(); });
}

PyObject* num_handles(PyObject* self, void*) {
  return PyLong_FromLong(reinterpret_cast<ValueObject*>(self)->handles.size);
}

PyObject* value_is_wanted(PyObject* self, PyObject*) {
  Handles& handles = reinterpret_cast<ValueObject*>(self)->handles;
  return PyBool_FromLong(
      std::any_of(handles.begin(), handles.end(), [](const HandleObject* h) { return h != nullptr; }));
}

PyObject* value_is_at_hand(PyObject* self, PyObject*) {
  const auto* value = reinterpret_cast<ValueObject*>(self);
  return PyBool_FromLong(!is_none(value->held) || !is_none(value->stored) || !is_none(value->cached));
}

PyObject* value_add_handle(PyObject* self, PyObject* handle) {
  return guarded([&] {
    add_handle(reinterpret_cast<ValueObject*>(self), handle);
    Py_RETURN_NONE;
  });
}

// The windows of the saved tensors on it that are alive, in the order of saving.
PyObject* value_windows(PyObject* self, PyObject*) {
  return guarded([&] {
    py::list windows;
    for (const HandleObject* handle : reinterpret_cast<ValueObject*>(self)->handles) {
      if (handle != nullptr) windows.append(py::reinterpret_borrow<py::object>(handle->window));
    }
    return windows.release().ptr();
  });
}

// Takes the handle that was made last from its value, None if there is none.
PyObject* value_take_last_handle(PyObject* self, PyObject*) {
  Handles& handles = reinterpret_cast<ValueObject*>(self)->handles;
  if (handles.size == 0) Py_RETURN_NONE;
  handles.size -= 1;
  HandleObject* handle = *handles.end();
  if (handle == nullptr) Py_RETURN_NONE;
  handle->listed_on = nullptr;
  return Py_NewRef(reinterpret_cast<PyObject*>(handle));
}

// value.num_readers(task): how often values that must be replayed in a backward read it.
PyObject* value_num_readers(PyObject* self, PyObject* task) {
  const auto* value = reinterpret_cast<ValueObject*>(self);
  return PyLong_FromLongLong(value->counted_task == PyLong_AsLongLong(task) ? value->num_readers : 0);
}

PyObject* value_is_reading(PyObject* self, PyObject* task) {
  const auto* value = reinterpret_cast<ValueObject*>(self);
  return PyBool_FromLong(value->counted_task == PyLong_AsLongLong(task) && value->is_reading != 0);
}

PyObject* step_outputs(PyObject* self, void*) {
  PyObject* outputs = reinterpret_cast<StepObject*>(self)->outputs;
  return outputs == nullptr ? PyTuple_New(0) : Py_NewRef(outputs);
}

PyObject* step_results(PyObject* self, void*) {
  return guarded([&] {
    py::list places;
    const auto* results = reinterpret_cast<StepObject*>(self)->results;
    if (results == nullptr) return places.release().ptr();
    for (const auto& [kind, index] : *results) places.append(py::make_tuple(kind, index));
    return places.release().ptr();
  });
}

PyObject* step_written(PyObject* self, void*) {
  PyObject* written = reinterpret_cast<StepObject*>(self)->written;
  return written == nullptr ? PyTuple_New(0) : Py_NewRef(written);
}

PyObject* step_add_written(PyObject* self, PyObject* value) {
  auto* step = reinterpret_cast<StepObject*>(self);
  return guarded([&] {
    if (step->written == nullptr) step->written = untracked(py::list().release().ptr());
    if (PyList_Append(step->written, value) != 0) throw py::error_already_set();
    Py_RETURN_NONE;
  });
}

PyObject* step_add_output(PyObject* self, PyObject* args) {
  PyObject* value;
  long kind, index;
  if (PyArg_ParseTuple(args, "O(ll)", &value, &kind, &index) == 0) return nullptr;
  return guarded([&] {
    add_output(reinterpret_cast<StepObject*>(self), reinterpret_cast<ValueObject*>(value), kind, index);
    Py_RETURN_NONE;
  });
}

PyObject* tape_cached_bytes(PyObject* self, void*) {
  const CachedBytes* cached = reinterpret_cast<TapeObject*>(self)->cached;
  return PyLong_FromLongLong(cached == nullptr ? 0 : cached->bytes);
}

PyObject* window_on(PyObject* self, PyObject* value) {
  return guarded([&] { return copy_of(reinterpret_cast<WindowObject*>(self), value).release().ptr(); });
}

PyObject* window_shape(PyObject* self, void*) {
  const auto* window = reinterpret_cast<WindowObject*>(self);
  return guarded([&] { return tuple_of(sizes_of(window), window->num_dims).release().ptr(); });
}

PyObject* window_stride(PyObject* self, void*) {
  const auto* window = reinterpret_cast<WindowObject*>(self);
  return guarded([&] { return tuple_of(strides_of(window), window->num_dims).release().ptr(); });
}

#define OBJECT(type, name, field) {name, T_OBJECT, offsetof(type, field), 0, nullptr}
#define NUMBER(type, name, field) {name, T_LONGLONG, offsetof(type, field), 0, nullptr}
#define FLAG(type, name, field) {name, T_BOOL, offsetof(type, field), 0, nullptr}
#define SEEN(type, name, field) {name, T_OBJECT, offsetof(type, field), READONLY, nullptr}
#define END {nullptr, 0, 0, 0, nullptr}

PyMemberDef value_members[] = {
    OBJECT(ValueObject, "device", device),
    OBJECT(ValueObject, "step", step),
    OBJECT(ValueObject, "operator", operator_),
    OBJECT(ValueObject, "action", action),
    OBJECT(ValueObject, "held", held),
    OBJECT(ValueObject, "root", root),
    OBJECT(ValueObject, "stored", stored),
    SEEN(ValueObject, "cached", cached),
    OBJECT(ValueObject, "spare", spare),
    OBJECT(ValueObject, "why_opaque", why_opaque),
    OBJECT(ValueObject, "asked", asked),
    OBJECT(ValueObject, "entry", entry),
    SEEN(ValueObject, "module", module),
    NUMBER(ValueObject, "nbytes", nbytes),
    NUMBER(ValueObject, "ordinal", ordinal),
    NUMBER(ValueObject, "index", index),
    NUMBER(ValueObject, "call", call),
    NUMBER(ValueObject, "occurrence", occurrence),
    NUMBER(ValueObject, "result", result),
    NUMBER(ValueObject, "version", version),
    NUMBER(ValueObject, "cached_task", cached_task),
    NUMBER(ValueObject, "key", key),
    NUMBER(ValueObject, "cached_version", cached_version),
    NUMBER(ValueObject, "first_use", first_use),
    NUMBER(ValueObject, "last_use", last_use),
    FLAG(ValueObject, "is_needed", is_needed),
    FLAG(ValueObject, "is_input", is_input),
    FLAG(ValueObject, "is_parameter", is_parameter),
    {"__weaklistoffset__", T_PYSSIZET, offsetof(ValueObject, weak_references), READONLY, nullptr},
    END};
PyMemberDef step_members[] = {OBJECT(StepObject, "operator", operator_),      OBJECT(StepObject, "args", args),
                              OBJECT(StepObject, "kwargs", kwargs),           OBJECT(StepObject, "inputs", inputs),
                              OBJECT(StepObject, "random", random),           OBJECT(StepObject, "numerics", numerics),
                              FLAG(StepObject, "grad_enabled", grad_enabled), END};
PyMemberDef block_members[] = {OBJECT(BlockObject, "storage", storage), OBJECT(BlockObject, "value", value), END};
PyMemberDef window_members[] = {OBJECT(WindowObject, "value", value),   OBJECT(WindowObject, "dtype", dtype),
                                NUMBER(WindowObject, "offset", offset), FLAG(WindowObject, "is_conj", is_conj),
                                FLAG(WindowObject, "is_neg", is_neg),   END};
PyMemberDef handle_members[] = {
    OBJECT(HandleObject, "tape", tape),
    OBJECT(HandleObject, "window", window),
    OBJECT(HandleObject, "alias", alias),
    OBJECT(HandleObject, "audit", audit),
    NUMBER(HandleObject, "task", task),
    NUMBER(HandleObject, "clock", clock),
    {"__weaklistoffset__", T_PYSSIZET, offsetof(HandleObject, weak_references), READONLY, nullptr},
    END};
PyMemberDef entry_members[] = {OBJECT(EntryObject, "operator", operator_),
                               OBJECT(EntryObject, "module", module),
                               OBJECT(EntryObject, "action", action),
                               OBJECT(EntryObject, "why", why),
                               OBJECT(EntryObject, "storage", storage),
                               NUMBER(EntryObject, "nbytes", nbytes),
                               NUMBER(EntryObject, "num_replays", num_replays),
                               NUMBER(EntryObject, "call", call),
                               NUMBER(EntryObject, "occurrence", occurrence),
                               NUMBER(EntryObject, "result", result),
                               END};
PyMemberDef tape_members[] = {OBJECT(TapeObject, "blocks", blocks),
                              OBJECT(TapeObject, "holding", holding),
                              OBJECT(TapeObject, "saved", saved),
                              OBJECT(TapeObject, "choice", choice),
                              OBJECT(TapeObject, "modules", modules),
                              OBJECT(TapeObject, "opaque_places", opaque_places),
                              OBJECT(TapeObject, "audited_places", audited_places),
                              OBJECT(TapeObject, "opaque_names", opaque_names),
                              OBJECT(TapeObject, "meter", meter),
                              OBJECT(TapeObject, "outer", outer),
                              OBJECT(TapeObject, "candidates", candidates),
                              OBJECT(TapeObject, "calls", calls),
                              NUMBER(TapeObject, "num_lost", num_lost),
                              NUMBER(TapeObject, "recompute_bytes", recompute_bytes),
                              NUMBER(TapeObject, "opaque_bytes", opaque_bytes),
                              OBJECT(TapeObject, "entries", entries),
                              NUMBER(TapeObject, "structure", structure),
                              NUMBER(TapeObject, "num_values", num_values),
                              NUMBER(TapeObject, "num_packed", num_packed),
                              NUMBER(TapeObject, "window_bytes", window_bytes),
                              NUMBER(TapeObject, "num_untold", num_untold),
                              OBJECT(TapeObject, "why_untold", why_untold),
                              OBJECT(TapeObject, "why_opaque", why_opaque),
                              NUMBER(TapeObject, "began_at", began_at),
                              FLAG(TapeObject, "is_open", is_open),
                              FLAG(TapeObject, "is_audited", is_audited),
                              FLAG(TapeObject, "audits_always", audits_always),
                              FLAG(TapeObject, "window_follows", window_follows),
                              END};
PyGetSetDef value_getters[] = {{"num_handles", num_handles, nullptr, nullptr, nullptr},
                               {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyGetSetDef tape_getters[] = {{"cached_bytes", tape_cached_bytes, nullptr, nullptr, nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyGetSetDef step_getters[] = {{"outputs", step_outputs, nullptr, nullptr, nullptr},
                              {"results", step_results, nullptr, nullptr, nullptr},
                              {"written", step_written, nullptr, nullptr, nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyGetSetDef window_getters[] = {{"shape", window_shape, nullptr, nullptr, nullptr},
                                {"stride", window_stride, nullptr, nullptr, nullptr},
                                {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyMethodDef value_methods[] = {{"add_handle", value_add_handle, METH_O, nullptr},
                               {"take_last_handle", value_take_last_handle, METH_NOARGS, nullptr},
                               {"is_wanted", value_is_wanted, METH_NOARGS, nullptr},
                               {"num_readers", value_num_readers, METH_O, nullptr},
                               {"is_reading", value_is_reading, METH_O, nullptr},
                               {"windows", value_windows, METH_NOARGS, nullptr},
                               {"is_at_hand", value_is_at_hand, METH_NOARGS, nullptr},
                               {nullptr, nullptr, 0, nullptr}};
PyMethodDef step_methods[] = {{"add_output", step_add_output, METH_VARARGS, nullptr},
                              {"add_written", step_add_written, METH_O, nullptr},
                              {nullptr, nullptr, 0, nullptr}};
PyMethodDef window_methods[] = {{"on", window_on, METH_O, nullptr}, {nullptr, nullptr, 0, nullptr}};

template <typename Function>
void* slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

PyType_Slot value_slots[] = {{Py_tp_new, slot(value_new)},   {Py_tp_dealloc, slot(value_dealloc)},
                             {Py_tp_members, value_members}, {Py_tp_getset, value_getters},
                             {Py_tp_methods, value_methods}, {0, nullptr}};
PyType_Slot step_slots[] = {{Py_tp_new, slot(step_new)},   {Py_tp_dealloc, slot(step_dealloc)},
                            {Py_tp_members, step_members}, {Py_tp_getset, step_getters},
                            {Py_tp_methods, step_methods}, {0, nullptr}};
PyType_Slot block_slots[] = {
    {Py_tp_new, slot(block_new)}, {Py_tp_dealloc, slot(block_dealloc)}, {Py_tp_members, block_members}, {0, nullptr}};
PyType_Slot window_slots[] = {{Py_tp_dealloc, slot(window_dealloc)},
                              {Py_tp_members, window_members},
                              {Py_tp_getset, window_getters},
                              {Py_tp_methods, window_methods},
                              {0, nullptr}};
PyType_Slot handle_slots[] = {{Py_tp_dealloc, slot(handle_dealloc)}, {Py_tp_members, handle_members}, {0, nullptr}};
PyType_Slot entry_slots[] = {{Py_tp_dealloc, slot(entry_dealloc)}, {Py_tp_members, entry_members}, {0, nullptr}};
PyType_Slot tape_slots[] = {{Py_tp_new, slot(PyType_GenericNew)},
                            {Py_tp_dealloc, slot(tape_dealloc)},
                            {Py_tp_traverse, slot(tape_traverse)},
                            {Py_tp_clear, slot(tape_clear)},
                            {Py_tp_members, tape_members},
                            {Py_tp_getset, tape_getters},
                            {0, nullptr}};

template <typename Object>
PyTypeObject* made(py::module_& module, const char* name, PyType_Slot* slots, unsigned long flags) {
  PyType_Spec spec = {name, sizeof(Object), 0, static_cast<unsigned int>(Py_TPFLAGS_DEFAULT | flags), slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  const char* short_name = std::strrchr(name, '.') + 1;
  module.add_object(short_name, py::reinterpret_borrow<py::object>(type));
  return reinterpret_cast<PyTypeObject*>(type);
}

}  // namespace

void add_replay_types(py::module_& module) {
  value_type = made<ValueObject>(module, "actckpt._C.Value", value_slots, 0);
  step_type = made<StepObject>(module, "actckpt._C.Step", step_slots, 0);
  block_type = made<BlockObject>(module, "actckpt._C.Block", block_slots, 0);
  window_type = made<WindowObject>(module, "actckpt._C.Window", window_slots, Py_TPFLAGS_DISALLOW_INSTANTIATION);
  handle_type = made<HandleObject>(module, "actckpt._C.Handle", handle_slots, Py_TPFLAGS_DISALLOW_INSTANTIATION);
  entry_type = made<EntryObject>(module, "actckpt._C.Entry", entry_slots, Py_TPFLAGS_DISALLOW_INSTANTIATION);
  tape_type = made<TapeObject>(module, "actckpt._C.TapeCore", tape_slots, Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC);
}

}  // namespace actckpt::replay
