// Arguments of a recorded call, with tensors replaced by windows on values.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Whether tensors of a type are recorded as they are. All others are subclasses, which call operators on their inner
// tensors.
bool is_tensor_type(PyObject* type);

// The arguments with windows; appends their values to the list `inputs`. Records in the tape an argument without a
// version counter: results that depend on it must not be replayed.
py::object args_with_windows(TapeObject* tape, PyObject* args, PyObject* inputs);
py::object kwargs_with_windows(TapeObject* tape, PyObject* kwargs, PyObject* inputs);  // None where there are none

void add_argument_functions(py::module_& module);

}  // namespace actckpt::replay
