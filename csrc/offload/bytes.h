// The bytes that one copy reads or writes: part of a storage. The engine holds them until the copy has ended.
//
// While the engine may read a storage, its Bytes object is marked as a source, whose memory is watched: see sources.h.
// Thread rule: GIL held. Ownership: the engine owns the object until the copy has ended.
#pragma once

#include "core/python.h"
#include "offload/sources.h"

namespace actckpt {

// The bytes of `storage` from `start`; not a source yet.
py::object new_bytes(PyObject* storage, long long start);

// Makes `bytes`, which must not be a source yet, a source until it dies.
SourceWatchPointer mark_as_source(PyObject* bytes);

bool is_bytes(PyObject* object);

// Borrowed.
PyObject* storage_behind(PyObject* bytes);
long long start_of(PyObject* bytes);

// Whether the storage still has `nbytes` from their start: its memory may have been freed.
bool holds(PyObject* bytes, long long nbytes);

// `torch.empty(0)`, without running Python code.
py::object empty_tensor(PyObject* dtype, PyObject* device);

// A tensor on the storage, for what only tensors have. Making one takes longer than keeping one that is at hand.
py::object tensor_over(PyObject* bytes);
void keep_tensor(PyObject* bytes, py::object tensor);

// New memory, to be read into.
py::object allocate_bytes(long long nbytes, PyObject* device);
long long address_of(PyObject* bytes);

void add_bytes_type(py::module_& module);

}  // namespace actckpt
