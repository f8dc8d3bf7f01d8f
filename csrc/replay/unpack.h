// The unpack hook: the way back of saved tensors.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

void add_unpack_functions(py::module_& module);

}  // namespace actckpt::replay
