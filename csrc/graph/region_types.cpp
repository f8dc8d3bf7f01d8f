// The Python types of a region: tape, handles of saved tensors, report rows.
#include "graph/python_types.h"

#include <utility>
#include <vector>

#include "core/collected.h"
#include "core/python.h"
#include "graph/needs.h"

namespace actckpt::replay {
namespace {

thread_local int free_depth = 0;
thread_local std::vector<PyObject*>* set_aside = nullptr;
constexpr int kMaxFreeDepth = 40;

}  // namespace

FreeScope::FreeScope() noexcept { free_depth += 1; }

FreeScope::~FreeScope() noexcept {
  free_depth -= 1;
  if (free_depth > 0 || set_aside == nullptr) return;
  while (!set_aside->empty()) {
    PyObject* next = set_aside->back();
    set_aside->pop_back();
    Py_DECREF(next);
  }
}

void release_field(PyObject*& field) noexcept {
  PyObject* object = std::exchange(field, nullptr);
  if (object == nullptr) return;
  if (free_depth <= kMaxFreeDepth || Py_REFCNT(object) > 1) {
    Py_DECREF(object);
    return;
  }
  if (set_aside == nullptr) set_aside = new std::vector<PyObject*>();
  set_aside->push_back(object);
}

template <typename Visit>
void for_each_reference(TapeObject& tape, const Visit& visit) {
  for (PyObject** field : {&tape.storages,
                           &tape.holding,
                           &tape.saved,
                           &tape.choice,
                           &tape.choice_facts.actions,
                           &tape.choice_facts.default_action,
                           &tape.lock,
                           &tape.replay_order,
                           &tape.modules,
                           &tape.opaque_places,
                           &tape.audited_places,
                           &tape.opaque_names,
                           &tape.entries,
                           &tape.outer,
                           &tape.argument_storages,
                           &tape.meter,
                           &tape.candidates,
                           &tape.calls,
                           &tape.why_unversioned,
                           &tape.why_opaque}) {
    visit(*field);
  }
}

namespace {

void handle_dealloc(PyObject* self) {
  py::error_scope pending;
  auto* handle = reinterpret_cast<HandleObject*>(self);
  ValueObject* value = handle->listed_on;
  forget_handle(handle);
  unlist(handle);  // before any Python code runs
  if (handle->weak_references != nullptr) PyObject_ClearWeakRefs(self);
  if (value != nullptr) release_needs(value, value->counted_task);
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
  auto* tape = reinterpret_cast<TapeObject*>(self);
  release(tape->cached);
  py::error_scope pending;
  PyTypeObject* type = Py_TYPE(self);
  {
    FreeScope scope;
    for_each_reference(*tape, release_field);
    type->tp_free(self);
  }
  Py_DECREF(type);
}

int tape_clear(PyObject* self) {
  reinterpret_cast<TapeObject*>(self)->is_open = 0;  // nothing is recorded in it any more
  return collected::clear<TapeObject>(self);
}

PyObject* tape_choice(PyObject* self, void*) {
  PyObject* choice = reinterpret_cast<TapeObject*>(self)->choice;
  return Py_NewRef(choice == nullptr ? Py_None : choice);
}

int set_tape_choice(PyObject* self, PyObject* choice, void*) {
  if (choice == nullptr) {
    PyErr_SetString(PyExc_AttributeError, "a tape has a policy");
    return -1;
  }
  auto* tape = reinterpret_cast<TapeObject*>(self);
  tape->choice_facts.are_known = 0;
  assign(tape->choice, choice);
  return 0;
}

// An open and empty tape.
PyObject* tape_new(PyTypeObject* type, PyObject*, PyObject*) {
  return guarded([&]() -> PyObject* {
    auto* tape = allocated<TapeObject>(type);
    py::object result = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(tape));
    tape->storages = py::dict().release().ptr();
    tape->holding = py::list().release().ptr();
    tape->saved = py::list().release().ptr();
    tape->candidates = py::list().release().ptr();
    tape->swap = tape->window_bytes = tape->counted_task = -1;
    tape->is_open = 1;
    return result.release().ptr();
  });
}

PyObject* tape_cached_bytes(PyObject* self, void*) {
  const CachedBytes* cached = reinterpret_cast<TapeObject*>(self)->cached;
  return PyLong_FromLongLong(cached == nullptr ? 0 : cached->bytes);
}

PyMemberDef handle_members[] = {
    OBJECT(HandleObject, "tape", tape),
    OBJECT(HandleObject, "window", window),
    OBJECT(HandleObject, "alias", alias),
    OBJECT(HandleObject, "audit", audit),
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
PyMemberDef tape_members[] = {OBJECT(TapeObject, "storages", storages),
                              OBJECT(TapeObject, "holding", holding),
                              OBJECT(TapeObject, "saved", saved),
                              OBJECT(TapeObject, "lock", lock),
                              OBJECT(TapeObject, "replay_order", replay_order),
                              NUMBER(TapeObject, "swap", swap),
                              OBJECT(TapeObject, "modules", modules),
                              OBJECT(TapeObject, "opaque_places", opaque_places),
                              OBJECT(TapeObject, "audited_places", audited_places),
                              OBJECT(TapeObject, "opaque_names", opaque_names),
                              OBJECT(TapeObject, "meter", meter),
                              OBJECT(TapeObject, "outer", outer),
                              OBJECT(TapeObject, "argument_storages", argument_storages),
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
                              NUMBER(TapeObject, "num_unversioned_args", num_unversioned_args),
                              OBJECT(TapeObject, "why_unversioned", why_unversioned),
                              OBJECT(TapeObject, "why_opaque", why_opaque),
                              NUMBER(TapeObject, "began_at", began_at),
                              FLAG(TapeObject, "is_open", is_open),
                              FLAG(TapeObject, "is_audited", is_audited),
                              FLAG(TapeObject, "audits_always", audits_always),
                              FLAG(TapeObject, "has_windows", has_windows),
                              FLAG(TapeObject, "repeats", repeats),
                              END};
PyGetSetDef tape_getters[] = {{"choice", tape_choice, set_tape_choice, nullptr, nullptr},
                              {"cached_bytes", tape_cached_bytes, nullptr, nullptr, nullptr},
                              {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot handle_slots[] = {{Py_tp_dealloc, slot(handle_dealloc)}, {Py_tp_members, handle_members}, {0, nullptr}};
PyType_Slot entry_slots[] = {{Py_tp_dealloc, slot(entry_dealloc)}, {Py_tp_members, entry_members}, {0, nullptr}};
PyType_Slot tape_slots[] = {{Py_tp_new, slot(tape_new)},
                            {Py_tp_dealloc, slot(tape_dealloc)},
                            {Py_tp_traverse, slot(collected::traverse<TapeObject>)},
                            {Py_tp_clear, slot(tape_clear)},
                            {Py_tp_members, tape_members},
                            {Py_tp_getset, tape_getters},
                            {0, nullptr}};

}  // namespace

PyTypeObject* handle_type = nullptr;
PyTypeObject* entry_type = nullptr;
PyTypeObject* tape_type = nullptr;

void add_region_types(py::module_& module) {
  handle_type = made<HandleObject>(module, "actckpt._C.Handle", handle_slots, Py_TPFLAGS_DISALLOW_INSTANTIATION);
  entry_type = made<EntryObject>(module, "actckpt._C.Entry", entry_slots, Py_TPFLAGS_DISALLOW_INSTANTIATION);
  tape_type = made<TapeObject>(module, "actckpt._C.TapeCore", tape_slots, Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC);
}

}  // namespace actckpt::replay
