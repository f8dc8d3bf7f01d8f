// The pack hook: what happens at every saved tensor of a region's forward.
#pragma once

#include "core/python.h"

namespace actckpt::replay {

void add_pack_functions(py::module_& module);

}  // namespace actckpt::replay
