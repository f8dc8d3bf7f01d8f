// Which value a storage holds now: storages go by identity (Rule 2 of NOTE [ Replay ]).
#pragma once

#include "graph/geometry.h"
#include "graph/objects.h"

namespace actckpt::replay {

// The value that the storage of `tensor` holds now; takes it as an input if nothing recorded made it. Null for tensors
// without a storage that can be read.
py::object value_of(TapeObject* tape, PyObject* tensor, const Geometry& geometry);

// The storage, or null for tensors that have none that can be read, or that have no strides to read it by.
py::object storage_of(PyObject* tensor, const Geometry& geometry);

// A tensor that unpack returned while the region is open: it is known as what it is (Rule 9 of NOTE [ Replay ]).
void note_unpacked(TapeObject* tape, PyObject* tensor, PyObject* value);

// What is known of a storage, or null; borrowed from the tape.
KnownStorageObject* known_storage_of(TapeObject* tape, PyObject* storage);

// Lets the storage hold `value`.
void add_known_storage(TapeObject* tape, PyObject* storage, PyObject* value);

// Notes through which tensor a value is seen, what that is a view of, and its version.
void record_version(ValueObject* value, PyObject* tensor, const py::object& root);

void add_known_storage_functions(py::module_& module);

}  // namespace actckpt::replay
