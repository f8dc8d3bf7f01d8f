// What a recorder does not see: kernels of compiled code, and tensors that an autograd.Function makes without recorded
// operators.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Whether the current operator is part of compiled code. Kernels that no dispatcher sees run between such operators, on
// the same memory. Replaying one operator alone would make other bytes (NOTE [ Replay ], Rule 8).
bool is_in_compiled_code();

// Checks whether an autograd.Function inside the region made `value`, which was taken for an input when a recorded
// operator or autograd met its tensor: by the grad_fn of its root ...
void record_maker_version(TapeObject* tape, ValueObject* value, PyObject* root);

// ... or, if autograd saves it and it has no grad_fn, by the running call of the Function that saves it.
void look_at_saver(TapeObject* tape, ValueObject* value, PyObject* tensor);

}  // namespace actckpt::replay
