// NOTE [ Candidates ]
//
// Replaying a dropped value holds what it is replayed from, its *leaves*. A value whose leaves have at most its bytes,
// or are held anyway, is dropped at once. Any other is a *candidate*: its bytes stay for now (`candidate_tensor`). One
// leaf may serve many candidates that are smaller than it, so they are decided together: a minimum cut
// (graph/least_held.h) of the graph between candidates and leaves has the fewest bytes. Keeping all candidates is one
// such cut, and is what plain autograd holds.
//
// Candidates are decided while the region is open, too, else it would hold more than plain autograd. A candidate that
// the cut drops is dropped: later candidates only add reasons to hold its leaves. One that the cut keeps is kept as
// soon as that releases a leaf, and at the latest when the region closes. Until then the program may save more values
// that are replayed from the same leaves. Inputs are held for no sum of small values: the program may change them
// before backward.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Makes a dropped value whose bytes are in `tensor` a candidate.
void add_candidate(TapeObject* tape, ValueObject* value, PyObject* tensor);

// Decides candidates, and releases kept values to which neither the program nor a recorded step refers, as plain
// autograd has by now. Does so when the bytes that the region holds have grown by a sixteenth and by
// `least_growth_bytes`.
void release_unused(TapeObject* tape);

void add_candidate_functions(py::module_& module);

}  // namespace actckpt::replay
