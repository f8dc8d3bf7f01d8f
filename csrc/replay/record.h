// Recording: what happens at every operator and every saved tensor of a region's forward.
#pragma once

#include "replay/objects.h"

namespace actckpt::replay {

// The value that the storage of `tensor` holds now; takes it as an input if nothing recorded made it. Null for tensors
// without a storage that can be read.
py::object value_of(TapeObject* tape, PyObject* tensor);

void add_record_functions(py::module_& module);

}  // namespace actckpt::replay
