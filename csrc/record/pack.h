// What happens at every saved tensor of a region's forward, and to what it holds when it closes.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

void add_pack_functions(py::module_& module);

}  // namespace actckpt::replay
