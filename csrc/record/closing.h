// What happens to the values that a region holds when it closes.
#pragma once

#include "core/python.h"

namespace actckpt::replay {

void add_closing_functions(py::module_& module);

}  // namespace actckpt::replay
