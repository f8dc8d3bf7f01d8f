// Recording: what happens at every operator of a region's forward.
#pragma once

#include "replay/geometry.h"
#include "replay/objects.h"

namespace actckpt::replay {

bool is_tensor_type(PyObject* type);

void append(PyObject* list, PyObject* item);

void add_record_functions(py::module_& module);

}  // namespace actckpt::replay
