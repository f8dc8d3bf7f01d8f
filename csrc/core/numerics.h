// Settings of the process and of the thread that change which numbers operators compute, read as one tuple.
//
// Which settings these are stands in actckpt/_core/numerics.py; they are read through functions of torch that take
// some ten nanoseconds each. Equal settings are one tuple, kept for good.
#pragma once

#include "core/python.h"

namespace actckpt {

// Settings that any operator may depend on; or all, also those that matter only where an element is computed from
// several.
enum class Numerics { kOfElements, kAll };

// The settings now. Throws what a getter raises.
py::object numerics_now(Numerics which);

// Whether the settings are still those of a tuple that `numerics_now` returned.
bool are_numerics(PyObject* noted);

void add_numerics_functions(py::module_& module);

}  // namespace actckpt
