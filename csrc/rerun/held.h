// Tensors that a region holds for its reruns.
//
// See NOTE [ Inputs of a region ] in actckpt/_rerun/inputs.py for the rules. Tensors and plain
// values as positional arguments, the common case, are held and given back here without running
// Python code.
#pragma once

#include "rerun/frame.h"

namespace actckpt {

// Attribute of tensors that stand for parameters in a rerun, which got them from the hooks outside.
constexpr const char* kParameterMark = "_actckpt_parameter";

// Holds positional arguments as a tuple; null if one of them is neither a tensor nor plain. Sets
// `on_device` where a tensor is not on the CPU.
py::object hold_arguments(PyObject* args, bool* on_device);

// The arguments of one rerun. Throws where a tensor was changed in place since it was held.
py::object restore_arguments(PyObject* held);

// A leaf with the bytes and the version counter of `tensor`, which requires grad if that does, but does
// not lead to its graph.
py::object leaf_of(const py::object& tensor, bool requires_grad, bool is_of_parameter);

// What to hold of a tensor that a forward displaced: a tensor with a graph would own the regions that
// made it.
py::object without_graph(const py::object& tensor);

void add_held_types(py::module_& module);

}  // namespace actckpt
