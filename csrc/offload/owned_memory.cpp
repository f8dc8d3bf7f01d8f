#include "offload/owned_memory.h"

#include <algorithm>
#include <unordered_map>

#include "core/reads.h"

namespace actckpt {
namespace {

// Storages by identity, confirmed by weak references: addresses are reused.
struct Owned {
  std::unordered_map<PyObject*, py::object> references;
  std::size_t sweep_at = 1024;
};

Owned& known() {
  static auto* all = new Owned();
  return *all;
}

// note_owned(tensor)
PyObject* note_tensor(PyObject*, PyObject* tensor) {
  return guarded([&]() -> PyObject* {
    note_owned(tensor);
    Py_RETURN_NONE;
  });
}

// reachable_storage(tensor) -> storage | None
PyObject* reachable(PyObject*, PyObject* tensor) {
  return guarded([&]() -> PyObject* {
    py::object storage = reachable_storage(tensor);
    return storage ? storage.release().ptr() : Py_NewRef(Py_None);
  });
}

PyMethodDef owned_functions[] = {
    {"note_owned", note_tensor, METH_O, "note_owned(tensor): its storage is never to be moved."},
    {"reachable_storage", reachable, METH_O, "reachable_storage(tensor): None where its bytes cannot be reached."},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

bool is_parameter(PyObject* tensor) {
  return (reads().requires_grad.is_true(tensor) && reads().is_leaf.is_true(tensor)) ||
         is_instance(tensor, names().parameter_type);
}

py::object reachable_storage(PyObject* tensor) {
  py::object storage = storage_of(tensor);
  if (!storage) return storage;
  try {
    return reads().data_ptr.number(storage.ptr()) == 0 ? py::object() : storage;
  } catch (py::error_already_set& error) {
    if (!error.matches(PyExc_RuntimeError)) throw;  // NotImplementedError is one
    return {};
  }
}

void note_owned(PyObject* tensor) {
  const py::object storage = storage_of(tensor);  // also if it has no bytes yet: FSDP fills it later
  if (!storage || is_known_owned(storage.ptr())) return;
  Owned& all = known();
  all.references[storage.ptr()] = py::reinterpret_steal<py::object>(new_reference(storage.ptr()));
  if (all.references.size() < all.sweep_at) return;
  for (auto entry = all.references.begin(); entry != all.references.end();) {
    const bool lives = refers_to(entry->first, entry->second.ptr());
    entry = lives ? std::next(entry) : all.references.erase(entry);
  }
  all.sweep_at = std::max<std::size_t>(1024, 2 * all.references.size());
}

bool is_known_owned(PyObject* storage) {
  const auto found = known().references.find(storage);
  return found != known().references.end() && refers_to(storage, found->second.ptr());
}

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

void add_owned_functions(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), owned_functions) < 0) throw_pending();
}

}  // namespace actckpt
