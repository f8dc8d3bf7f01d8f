// Which value each storage holds now. Storages are recognised by identity (NOTE [ Replay ], Rule 2).
#pragma once

#include "graph/geometry.h"
#include "graph/objects.h"

namespace actckpt::replay {

// The current value of the storage of `tensor`; an unknown storage becomes an input. Null for tensors without a
// readable storage.
py::object value_of(TapeObject* tape, PyObject* tensor, const Geometry& geometry);

// The storage, or null for tensors without a readable storage or without strides.
py::object storage_of(PyObject* tensor, const Geometry& geometry);

// A tensor that unpack returned while the region is open keeps its identity as a value (NOTE [ Replay ], Rule 7).
void note_unpacked(TapeObject* tape, PyObject* tensor, PyObject* value);

// What is known of a storage, or null; borrowed from the tape.
KnownStorageObject* known_storage_of(TapeObject* tape, PyObject* storage);

// Sets the value that a storage holds.
void add_known_storage(TapeObject* tape, PyObject* storage, PyObject* value);

// Records through which tensor a value is seen, the base of that tensor, and its version.
void record_version(ValueObject* value, PyObject* tensor, const py::object& root);

void add_known_storage_functions(py::module_& module);

}  // namespace actckpt::replay
