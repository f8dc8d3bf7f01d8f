// What becomes of a value that autograd saves for the first time.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Keeps, moves or drops a value, as the policy says; `tensor` is on it. What cannot be replayed is kept. Python asks
// policy functions, moves bytes, and knows what was lost.
void decide(TapeObject* tape, ValueObject* value, PyObject* tensor);

void add_decide_functions(py::module_& module);

}  // namespace actckpt::replay
