// Settings of the process and the thread that change operator results, read as one tuple.
//
// actckpt/_core/numerics.py selects these settings. They are read through torch functions that take some ten
// nanoseconds each. Equal settings share one tuple, which is never released.
#pragma once

#include "core/python.h"

namespace actckpt {

// The settings that any operator may depend on; or all of them, including those that matter only if a result element
// depends on several elements.
enum class Numerics { kOfElements, kAll };

// The current settings. Throws what a getter raises.
py::object numerics_now(Numerics which);

// Whether the current settings equal a tuple that `numerics_now` returned.
bool are_numerics(PyObject* noted);

void add_numerics_functions(py::module_& module);

}  // namespace actckpt
