#include "record/unused.h"

#include <utility>
#include <vector>

#include "core/python.h"
#include "core/reads.h"
#include "graph/least_held.h"

namespace actckpt::replay {
namespace {

constexpr long long kGrowth = 16;
constexpr long long kLeastBytes = 1 << 16;  // operators on fewer take less time than it does to look

// Forgets storages that are gone, and with them what no handle leads to. The last go first: they hold earlier ones.
void forget_dead_storages(TapeObject* tape) {
  std::vector<py::object> dead;
  PyObject *key, *known;
  Py_ssize_t position = 0;
  while (PyDict_Next(tape->storages, &position, &key, &known) != 0) {
    if (referent(reinterpret_cast<KnownStorageObject*>(known)->storage) == nullptr) {
      dead.push_back(py::reinterpret_borrow<py::object>(key));
    }
  }
  for (auto key_of_dead = dead.rbegin(); key_of_dead != dead.rend(); ++key_of_dead) {
    PyObject* found = PyDict_GetItem(tape->storages, key_of_dead->ptr());
    if (found == nullptr || referent(reinterpret_cast<KnownStorageObject*>(found)->storage) != nullptr) continue;
    if (PyDict_DelItem(tape->storages, key_of_dead->ptr()) != 0) throw py::error_already_set();
  }
}

// Whether a value goes with the list that holds it: no step and no handle is on it, and nobody else has its bytes.
bool is_unused(TapeObject* tape, PyObject* item) {
  auto* value = reinterpret_cast<ValueObject*>(item);
  if (Py_REFCNT(item) > 2 || !is_unshared(value)) return false;
  const py::object storage = reads().untyped_storage(value->held);
  const auto key = py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(storage.ptr()));
  PyObject* known = PyDict_GetItem(tape->storages, key.ptr());
  if (known == nullptr || reinterpret_cast<KnownStorageObject*>(known)->value != item) return false;
  if (PyDict_DelItem(tape->storages, key.ptr()) != 0) throw py::error_already_set();
  return true;
}

}  // namespace

void release_unused(TapeObject* tape) {
  if (tape->new_held_bytes < tape->held_bytes / kGrowth + kLeastBytes) return;
  tape->new_held_bytes = tape->held_bytes = 0;
  forget_dead_storages(tape);
  if (PyList_GET_SIZE(tape->candidates) > 0) {
    call_with(names().decide_candidates, reinterpret_cast<PyObject*>(tape), Py_False);
  }
  // What is released may run code of the user that records: it finds a list of its own.
  const py::object holding = py::reinterpret_borrow<py::object>(tape->holding);
  assign(tape->holding, py::list().ptr());
  std::vector<PyObject*> used;
  for (Py_ssize_t i = PyList_GET_SIZE(holding.ptr()) - 1; i >= 0; --i) {
    PyObject* item = PyList_GET_ITEM(holding.ptr(), i);
    if (is_unused(tape, item)) {
      Py_INCREF(Py_None);
      if (PyList_SetItem(holding.ptr(), i, Py_None) != 0) throw py::error_already_set();
    } else {
      used.push_back(item);
      if (reinterpret_cast<ValueObject*>(item)->is_parameter == 0) {
        tape->held_bytes += reinterpret_cast<ValueObject*>(item)->nbytes;
      }
    }
  }
  for (const py::handle waiting : py::reinterpret_borrow<py::list>(tape->candidates)) {
    tape->held_bytes += as_value(waiting)->nbytes;
  }
  const py::object later = py::reinterpret_borrow<py::object>(tape->holding);
  assign(tape->holding, py::list().ptr());
  for (auto item = used.rbegin(); item != used.rend(); ++item) append(tape->holding, *item);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(later.ptr()); ++i) append(tape->holding, PyList_GET_ITEM(later.ptr(), i));
}

}  // namespace actckpt::replay
