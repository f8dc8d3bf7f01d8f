// Stretches of storages that the engine reads from or writes to.
//
// NOTE [ Sources ]: a Bytes object keeps its storage alive, but a storage may let go of its memory
// while it lives (`untyped_storage().resize_(0)`). While the engine may read a storage, its Bytes
// object is marked as a source; actckpt/runtime/sources.py asks for that before memory is freed.
// Thread rule: GIL held. Ownership: the engine owns the object until the copy has ended.
#pragma once

#include "frames/python.h"

namespace actckpt {

// Bytes from `start` of `storage`; not a source yet.
py::object new_bytes(PyObject* storage, long long start);

// From now until it dies, `bytes` is a source.
void mark_as_source(PyObject* bytes);

bool is_bytes(PyObject* object);

// Borrowed.
PyObject* storage_of(PyObject* bytes);
long long start_of(PyObject* bytes);

void add_bytes_type(py::module_& module);

}  // namespace actckpt
