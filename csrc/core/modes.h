// Dispatch modes of this thread that may change operator results: NOTE [ Modes ] in actckpt/_core/modes.py.
#pragma once

#include "core/python.h"

namespace actckpt {

// The modes as a tuple, outermost first.
py::object unknown_modes();

void add_mode_functions(py::module_& module);

}  // namespace actckpt
