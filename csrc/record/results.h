// Results of a recorded call: the new values among them, how they are made and what the policy says about them.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Adds the results of a call, tensors or sequences of them, to the tape. `step`: what makes them, null if it must not
// be replayed. `action`: for all of them, None if each has its own. `index`: the number of results before these.
void add_results(TapeObject* tape, StepObject* step, PyObject* op, PyObject* result, PyObject* action,
                 PyObject* why_opaque, long& index);

void add_result_functions(py::module_& module);

}  // namespace actckpt::replay
