// What tells that a saved tensor was changed in place.
//
// An alias counts versions together with the tensor that it was made from, if `detach` is torch's own. Subclasses may
// have a `detach` in Python that makes a new wrapper with a counter of its own (TransformerEngine's quantized
// tensors): its version is its own affair, and the tensor is asked too, as long as it lives.
// Thread rule: GIL held. Ownership: refers to the tensor weakly, and to the alias not at all.
#pragma once

#include <pybind11/pybind11.h>

namespace actckpt {

namespace py = pybind11;

class VersionCheck {
 public:
  VersionCheck() = default;

  // `held` is what is held of `tensor`, which is at `version`: itself, or what its `detach` returned.
  VersionCheck(PyObject* tensor, long long version, PyObject* held);

  // Whether `held`, or the tensor that it was made from, was changed; then the versions found and expected.
  bool is_changed(PyObject* held, long long* found, long long* expected) const;

 private:
  long long version_ = 0;
  py::object tensor_;  // weak; null where the versions of `held` tell
  long long tensor_version_ = 0;
};

}  // namespace actckpt
