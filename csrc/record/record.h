// Recording: what happens at every operator of a region's forward.
#pragma once

#include "graph/geometry.h"
#include "graph/objects.h"

namespace actckpt::replay {

bool is_tensor_type(PyObject* type);

void append(PyObject* list, PyObject* item);

void add_record_functions(py::module_& module);

}  // namespace actckpt::replay
