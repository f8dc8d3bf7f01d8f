// Results of a recorded call: the new values among them, how they come about and what the policy wants with them.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Adds what a call returned, tensors or sequences of them, to the tape. `step`: what makes them, null where that must
// not run again. `action`: for all of them, None where each has its own. `index`: how many results came before.
void add_results(TapeObject* tape, StepObject* step, PyObject* op, PyObject* result, PyObject* action,
                 PyObject* why_opaque, long& index);

void add_result_functions(py::module_& module);

}  // namespace actckpt::replay
