// Memory that is kept anyway: that of parameters and buffers.
//
// See NOTE [ Offload ], Rule 1, in actckpt/_offload/session.py. Thread rule: GIL held. Ownership: weak references to
// storages.
#pragma once

#include "core/python.h"

namespace actckpt {

// Whether it is a parameter, or a leaf that counts as one.
bool is_parameter(PyObject* tensor);

// The storage; null if its bytes are unreachable, as for torch.func's wrappers, or if there are none.
py::object reachable_storage(PyObject* tensor);

// Marks the storage of `tensor` as never to be offloaded.
void note_owned(PyObject* tensor);
bool is_known_owned(PyObject* storage);

// Whether a weak reference refers to `object`, which is alive.
bool refers_to(const PyObject* object, PyObject* reference);
PyObject* new_reference(PyObject* object);

void add_owned_functions(py::module_& module);

}  // namespace actckpt
