// The saved tensor object itself, which plain autograd returns if it needs no grad, and its Python attributes.
//
// Unpack returns that object if the program still holds it and its bytes are those that were saved. Otherwise it
// returns a fresh alias with the object's attributes: the current ones, or those at saving if the object is dead.
// Thread rule: GIL held. Ownership: weak reference to the object, strong ones to the values of its attributes.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace actckpt {

namespace py = pybind11;

class SavedIdentity {
 public:
  // For `tensor`, which is about to be saved. Null if autograd makes a new tensor anyway, or if only the hook holds the
  // object.
  static std::unique_ptr<SavedIdentity> of(PyObject* tensor);

  // The object, if the fresh `alias` is the same tensor on the same bytes; else `alias` with attributes.
  py::object resolved(py::object alias) const;

  // `alias` with attributes.
  py::object with_attributes(py::object alias) const;

 private:
  explicit SavedIdentity(PyObject* tensor);
  bool is_same(PyObject* original, PyObject* alias) const;

  py::object reference_;   // weak
  py::object attributes_;  // null: none
  long long version_;
  bool must_be_alias_;  // backward may clear what unpack returns
};

}  // namespace actckpt
