// Which memory somebody else keeps anyway: that of parameters and buffers.
//
// Rule 1 of NOTE [ Offload ] in actckpt/_offload/session.py. Thread rule: GIL held. Ownership: storages are noted by
// weak references.
#pragma once

#include "core/python.h"

namespace actckpt {

// Whether it is a parameter, or a leaf like one.
bool is_parameter(PyObject* tensor);

// The storage; null where its bytes cannot be reached, as of torch.func's wrappers, or where there are none.
py::object reachable_storage(PyObject* tensor);

// The storage of `tensor` is never to be moved.
void note_owned(PyObject* tensor);
bool is_known_owned(PyObject* storage);

// Whether a weak reference is one to `object`, which lives.
bool refers_to(const PyObject* object, PyObject* reference);
PyObject* new_reference(PyObject* object);

void add_owned_functions(py::module_& module);

}  // namespace actckpt
