// The unpack hook: restores saved tensors.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

void add_unpack_functions(py::module_& module);

}  // namespace actckpt::replay
