// Detects in-place changes of a saved tensor.
//
// torch's own `detach` returns an alias that shares the version counter. A subclass may have a Python `detach` that
// makes a new wrapper with its own counter (TransformerEngine's quantized tensors). So the tensor's own version is
// checked too, while it is alive.
// Thread rule: GIL held. Ownership: a weak reference to the tensor, none to the alias.
#pragma once

#include <pybind11/pybind11.h>

namespace actckpt {

namespace py = pybind11;

class VersionCheck {
 public:
  VersionCheck() = default;

  // `held` is what is held of `tensor`, which is at `version`: itself, or the result of its `detach`.
  VersionCheck(PyObject* tensor, long long version, PyObject* held);

  // Whether `held`, or the tensor that it was made from, was changed; sets the versions found and expected.
  bool is_changed(PyObject* held, long long* found, long long* expected) const;

 private:
  long long version_ = 0;
  py::object tensor_;  // weak; null if the version of `held` suffices
  long long tensor_version_ = 0;
};

}  // namespace actckpt
