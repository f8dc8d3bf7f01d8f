// Tensors that a region holds for its reruns.
//
// See NOTE [ Inputs of a region ] in actckpt/_rerun/inputs.py. Positional arguments that are tensors and plain values,
// the common case, are held and restored here without running Python code.
#pragma once

#include "rerun/frame.h"

namespace actckpt {

// Attribute of tensors that outer hooks returned to a rerun in the place of parameters.
constexpr const char* kParameterMark = "_actckpt_parameter";

// Holds positional arguments as a tuple; null if one of them is neither a tensor nor plain. Sets `on_device` if a
// tensor is not on the CPU.
py::object hold_arguments(PyObject* args, bool* on_device);

// The arguments of one rerun. Throws if a tensor was changed in place since it was held.
py::object restore_arguments(PyObject* held);

// A leaf with the bytes and the version counter of `tensor`. It requires grad if `tensor` does, but is not connected to
// its graph.
py::object leaf_of(const py::object& tensor, bool requires_grad, bool is_of_parameter);

// What to hold of a tensor that a forward displaced: a tensor with a graph would own the regions that made it.
py::object without_graph(const py::object& tensor);

void add_held_types(py::module_& module);

}  // namespace actckpt
