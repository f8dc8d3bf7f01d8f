// The way back of saved tensors whose bytes are at hand, or one plain operator away.
#pragma once

#include "replay/objects.h"

namespace actckpt::replay {

void add_unpack_functions(py::module_& module);

}  // namespace actckpt::replay
