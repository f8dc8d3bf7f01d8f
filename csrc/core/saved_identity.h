// The very object that was saved, which plain autograd gives back where it needs no grad, and its Python attributes.
//
// Whoever holds the bytes of a saved tensor gives back that object where the program still holds it and its bytes are
// those that were saved; else a fresh alias with its attributes: those that it has, or had when it was saved.
// Thread rule: GIL held. Ownership: refers to the object weakly, and to what its attributes were.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>

namespace actckpt {

namespace py = pybind11;

class SavedIdentity {
 public:
  // What is to be known of `tensor`, which is about to be saved; null where autograd makes a tensor of its own anyway,
  // and where nobody but the hook has the object.
  static std::unique_ptr<SavedIdentity> of(PyObject* tensor);

  // The object, if `alias`, which is a fresh one, is the same tensor on the same bytes; else `alias` with attributes.
  py::object resolved(py::object alias) const;

  // `alias` with attributes.
  py::object with_attributes(py::object alias) const;

 private:
  explicit SavedIdentity(PyObject* tensor);
  bool is_same(PyObject* original, PyObject* alias) const;

  py::object reference_;   // weak
  py::object attributes_;  // null: it had none
  long long version_;
  bool must_be_alias_;  // backward may clear what it is given
};

}  // namespace actckpt
