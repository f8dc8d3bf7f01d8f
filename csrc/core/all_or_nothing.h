// Methods that a signal handler cannot interrupt half-way.
#pragma once

#include "core/python.h"

namespace actckpt {

// all_or_nothing(method, undo): a method that calls `method(self, ...)` and, if that raises, `undo(self, error)` before
// it raises. A signal handler may raise at any line of Python code, even at the first one of `__exit__`; it cannot
// raise inside this function.
void add_all_or_nothing(py::module_& module);

}  // namespace actckpt
