// The decision about a value that autograd saves for the first time.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Keeps, offloads or drops a value, as the policy says; `tensor` is on it. A value that cannot be replayed is kept.
// Python queries policy functions, moves bytes, and knows which values were lost.
void decide(TapeObject* tape, ValueObject* value, PyObject* tensor);

void add_decide_functions(py::module_& module);

}  // namespace actckpt::replay
