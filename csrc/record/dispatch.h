// The dispatch handler of a recorder: what happens at every operator of a region's forward. Operators that only read
// their arguments and return new tensors are recorded here; all others by `record_special` in
// actckpt/_replay/recorder.py.
#pragma once

#include "core/python.h"

namespace actckpt::replay {

void add_dispatch_functions(py::module_& module);

}  // namespace actckpt::replay
