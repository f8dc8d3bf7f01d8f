// Running a region: its forward with the hooks of a frame, and its reruns.
//
// See NOTE [ Rerun ] in actckpt/_rerun/region.py. Every region goes this way. Plain positional arguments are held here
// (held.h), all others by Python's Region. Python is around the user's function only where something other than random
// state must be put back, or where the region adds contexts.
#pragma once

#include "rerun/frame.h"

namespace actckpt {

void add_region_functions(py::module_& module);

}  // namespace actckpt
