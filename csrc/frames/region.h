// Running a region: its forward with the hooks of a frame, and its reruns.
//
// See NOTE [ Rerun ] in actckpt/runtime/rerun.py for the rules. A region whose inputs, state and
// contexts are of the common kind is run and rerun here without Python code around the user's
// function; every other one is handed to Python's `refill`.
#pragma once

#include "frames/frame.h"

namespace actckpt {

// Whether this thread is in a rerun.
bool is_in_rerun() noexcept;

void add_region_functions(py::module_& module);

}  // namespace actckpt
