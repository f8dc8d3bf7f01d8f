#include "core/version_check.h"

#include "core/python.h"

namespace actckpt {

VersionCheck::VersionCheck(PyObject* tensor, long long version, PyObject* held) : version_(version) {
  if (held == tensor || is_plain_tensor(tensor)) return;
  version_ = version_of(held);
  PyObject* reference = PyWeakref_NewRef(tensor, nullptr);
  if (reference == nullptr) throw py::error_already_set();
  tensor_ = py::reinterpret_steal<py::object>(reference);
  tensor_version_ = version;
}

bool VersionCheck::is_changed(PyObject* held, long long* found, long long* expected) const {
  *found = version_of(held);
  *expected = version_;
  if (*found != *expected || !tensor_) return *found != *expected;
  const py::object tensor = call(tensor_.ptr());
  if (tensor.is_none()) return false;
  *found = version_of(tensor.ptr());
  *expected = tensor_version_;
  return *found != *expected;
}

}  // namespace actckpt
