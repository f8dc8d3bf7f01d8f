#include "core/meter.h"

#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <new>
#include <unordered_map>
#include <utility>

#include "core/reads.h"

namespace actckpt {
namespace {

// Detects the death of a storage: a weak reference, and the StorageDeath that it calls.
struct Watch {
  py::object reference;
  py::object death;
};

using Storages = std::unordered_map<PyObject*, Watch>;

struct MeterObject {
  PyObject_HEAD Storages alive;  // by storage, borrowed: entries go when their storages die
  long long live_bytes;
  long long peak_bytes;
};

// Called when a storage dies. The meter owns it, not the storage, which may outlive the meters of thousands of steps.
struct DeathObject {
  PyObject_HEAD MeterObject* meter;  // borrowed; null once it is freed
  PyObject* storage;                 // borrowed
  long long nbytes;
};

PyTypeObject* meter_type = nullptr;
PyTypeObject* death_type = nullptr;

PyObject* meter_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) new (&reinterpret_cast<MeterObject*>(self)->alive) Storages();
  return self;
}

void meter_dealloc(PyObject* self) {
  Storages& alive = reinterpret_cast<MeterObject*>(self)->alive;
  for (const auto& [storage, watch] : alive) reinterpret_cast<DeathObject*>(watch.death.ptr())->meter = nullptr;
  alive.~Storages();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* death_call(PyObject* self, PyObject*, PyObject*) {
  auto* death = reinterpret_cast<DeathObject*>(self);
  if (death->meter != nullptr) {
    death->meter->live_bytes -= death->nbytes;
    death->meter->alive.erase(death->storage);
  }
  Py_RETURN_NONE;
}

void death_dealloc(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

// note(storage)
PyObject* meter_note(PyObject* self, PyObject* storage) {
  return guarded([&]() -> PyObject* {
    note_alive(self, storage);
    Py_RETURN_NONE;
  });
}

PyMemberDef meter_members[] = {{"live_bytes", T_LONGLONG, offsetof(MeterObject, live_bytes), READONLY, nullptr},
                               {"peak_bytes", T_LONGLONG, offsetof(MeterObject, peak_bytes), READONLY, nullptr},
                               {nullptr, 0, 0, 0, nullptr}};
PyMethodDef meter_methods[] = {{"note", meter_note, METH_O, "note(storage): count it until it dies."},
                               {nullptr, nullptr, 0, nullptr}};
PyType_Slot meter_slots[] = {{Py_tp_new, reinterpret_cast<void*>(meter_new)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(meter_dealloc)},
                             {Py_tp_members, meter_members},
                             {Py_tp_methods, meter_methods},
                             {Py_tp_doc, const_cast<char*>("Counts bytes of storages that are alive at once.")},
                             {0, nullptr}};
PyType_Spec meter_spec = {"actckpt._C.Meter", sizeof(MeterObject), 0, Py_TPFLAGS_DEFAULT, meter_slots};
PyType_Slot death_slots[] = {{Py_tp_call, reinterpret_cast<void*>(death_call)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(death_dealloc)},
                             {0, nullptr}};
PyType_Spec death_spec = {"actckpt._C.StorageDeath", sizeof(DeathObject), 0,
                          Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, death_slots};

}  // namespace

bool note_alive(PyObject* object, PyObject* storage) {
  if (object == nullptr || object == Py_None) return false;
  auto* meter = reinterpret_cast<MeterObject*>(object);
  if (meter->alive.count(storage) != 0) return false;
  PyObject* made = death_type->tp_alloc(death_type, 0);
  if (made == nullptr) throw py::error_already_set();
  auto owner = py::reinterpret_steal<py::object>(made);
  auto* death = reinterpret_cast<DeathObject*>(made);
  death->meter = meter;
  death->storage = storage;
  death->nbytes = reads().nbytes.number(storage);
  auto reference = owned(PyWeakref_NewRef(storage, made));
  PyObject_GC_UnTrack(reference.ptr());
  meter->alive.emplace(storage, Watch{std::move(reference), std::move(owner)});
  meter->live_bytes += death->nbytes;
  meter->peak_bytes = std::max(meter->peak_bytes, meter->live_bytes);
  return true;
}

void add_meter_type(py::module_& module) {
  death_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&death_spec));
  meter_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&meter_spec));
  if (death_type == nullptr || meter_type == nullptr) throw py::error_already_set();
  module.add_object("Meter", reinterpret_cast<PyObject*>(meter_type));
}

}  // namespace actckpt
