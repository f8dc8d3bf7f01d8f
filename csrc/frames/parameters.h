// Versions of a module's parameters: whether any was changed in place.
//
// A parameter that no operator saves (a bias, a weight whose input needs no gradient) changes what a
// rerun computes without any saved tensor showing it. In-place operators only ever raise versions, so
// their sum tells.
#pragma once

#include <pybind11/pybind11.h>

namespace actckpt {

namespace py = pybind11;

// The sum over the module and everything in it. Also takes a method of a module.
long long sum_parameter_versions(PyObject* module);

void add_parameter_functions(py::module_& module);

}  // namespace actckpt
