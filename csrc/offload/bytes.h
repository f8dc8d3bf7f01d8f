// The bytes that one copy reads or writes, a stretch of a storage, as the engine holds them until it has ended.
//
// While the engine may read a storage, its Bytes object is marked as a source, whose memory is
// watched: see sources.h.
// Thread rule: GIL held. Ownership: the engine owns the object until the copy has ended.
#pragma once

#include "core/python.h"
#include "offload/sources.h"

namespace actckpt {

// Bytes from `start` of `storage`; not a source yet.
py::object new_bytes(PyObject* storage, long long start);

// From now until it dies, `bytes`, which is not one yet, is a source.
SourceWatchPointer mark_as_source(PyObject* bytes);

bool is_bytes(PyObject* object);

// Borrowed.
PyObject* storage_behind(PyObject* bytes);
long long start_of(PyObject* bytes);

// Whether the storage still has `nbytes` from where they start: its memory may have been freed.
bool holds(PyObject* bytes, long long nbytes);

// `torch.empty` of a size, without a call of Python code.
py::object new_tensor(PyObject* size, PyObject* dtype, PyObject* device);

// Memory of its own, to be read into.
py::object allocate_bytes(long long nbytes, PyObject* device);
long long address_of(PyObject* bytes);

void add_bytes_type(py::module_& module);

}  // namespace actckpt
