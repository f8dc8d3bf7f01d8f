// Recording: what happens at every operator of a region's forward.
#pragma once

#include "replay/geometry.h"
#include "replay/objects.h"

namespace actckpt::replay {

// The value that the storage of `tensor` holds now; takes it as an input if nothing recorded made it. Null for tensors
// without a storage that can be read.
py::object value_of(TapeObject* tape, PyObject* tensor, const Geometry& geometry);

// The storage, or null for tensors that have none that can be read, or that have no strides to read it by.
py::object storage_of(PyObject* tensor, const Geometry& geometry);

bool is_tensor_type(PyObject* type);

// The tensor whose version counter `tensor` counts with: what it is a view of, or itself.
py::object root_of(PyObject* tensor);

void append(PyObject* list, PyObject* item);

void add_record_functions(py::module_& module);

}  // namespace actckpt::replay
