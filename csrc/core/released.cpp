#include "core/released.h"

#include <unordered_map>
#include <utility>

#include "core/reads.h"

namespace actckpt {

Released::Released(PyObject* wanted) : wanted_(PyLong_AsLongLong(wanted)) {
  if (wanted_ == -1 && PyErr_Occurred() != nullptr) throw_pending();
}

void Released::free(std::vector<py::object> tensors) {
  struct Storage {
    py::object reference;  // weak
    long long nbytes;
  };
  std::unordered_map<PyObject*, Storage> storages;
  for (const py::object& tensor : tensors) {
    if (!is_plain_tensor(tensor.ptr())) continue;  // a subclass's storage need not hold its bytes
    const py::object storage = storage_of(tensor.ptr());
    if (!storage || storages.count(storage.ptr()) != 0) continue;
    PyObject* reference = PyWeakref_NewRef(storage.ptr(), nullptr);
    if (reference == nullptr) throw_pending();
    storages[storage.ptr()] = {py::reinterpret_steal<py::object>(reference), reads().nbytes.number(storage.ptr())};
  }
  tensors.clear();
  for (const auto& [_, storage] : storages) {
    if (call(storage.reference.ptr()).is_none()) nbytes_ += storage.nbytes;
  }
}

}  // namespace actckpt
