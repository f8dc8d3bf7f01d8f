// Running a region: its forward with the hooks of a frame, and its reruns.
//
// See NOTE [ Rerun ] in actckpt/_rerun/region.py. Common regions (positional tensors and plain values, no contexts) are
// run and rerun here without Python code around the user's function. Python's `recomputed` reruns all others.
#pragma once

#include "rerun/frame.h"

namespace actckpt {

void add_region_functions(py::module_& module);

}  // namespace actckpt
