// Running a region: its forward with the hooks of a frame, and its reruns.
//
// See NOTE [ Rerun ] in actckpt/_rerun/region.py for the rules. A region whose inputs, state and
// contexts are of the common kind is run and rerun here without Python code around the user's
// function; every other one is handed to Python's `refill`.
#pragma once

#include "rerun/frame.h"

namespace actckpt {

void add_region_functions(py::module_& module);

}  // namespace actckpt
