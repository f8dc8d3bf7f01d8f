// What a recorder does not see: the kernels of compiled code, and tensors that an autograd.Function makes by other
// means than recorded operators.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Whether the operator that is being called is part of compiled code. Kernels that no dispatcher sees run between such
// operators, on the same memory: to execute one of them again would make other bytes (Rule 10 of NOTE [ Replay ]).
bool is_in_compiled_code();

// Tells the tape if `value`, taken for an input when a recorded operator or autograd met `tensor`, was made inside of
// the region by an autograd.Function: by the node of its root ...
void record_maker_version(TapeObject* tape, ValueObject* value, PyObject* root);

// ... or, where autograd saves it and it has none, by the call of the Function that is saving it.
void look_at_saver(TapeObject* tape, ValueObject* value, PyObject* tensor);

}  // namespace actckpt::replay
