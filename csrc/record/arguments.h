// Arguments of a recorded call: as they are but for tensors, in whose place stand windows on values.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Whether tensors of a type are recorded as they are. All others are subclasses, which call operators on what is inside
// of them.
bool is_tensor_type(PyObject* type);

// The arguments with windows; the values that they are on are added to the list `inputs`. An argument of which nobody
// tells when it changes is noted in the tape: what is made from it must not be made again.
py::object args_with_windows(TapeObject* tape, PyObject* args, PyObject* inputs);
py::object kwargs_with_windows(TapeObject* tape, PyObject* kwargs, PyObject* inputs);  // None where there are none

void add_argument_functions(py::module_& module);

}  // namespace actckpt::replay
