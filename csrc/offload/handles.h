// What autograd holds instead of a saved tensor when offloading.
//
// See NOTE [ Offload ] in actckpt/_offload/session.py, Rules 2 to 4. Thread rule: GIL held.
#pragma once

#include "offload/span.h"

namespace actckpt {

// A saved tensor that stays.
py::object new_unmoved(PyObject* tensor);

// A saved tensor that was offloaded.
py::object new_moved(PyObject* tensor, Placed placed, const TensorExtent& extent);

// The tensor of any handle; Python handles have a method `unpack`.
py::object unpack_handle(PyObject* handle);

void add_handle_types(py::module_& module);

}  // namespace actckpt
