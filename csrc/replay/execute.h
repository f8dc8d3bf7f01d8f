// Execute recorded steps again: the bytes of a value, from values that are available to the one that is asked for.
//
// Thread rule: GIL held; operators, and what brings stored bytes back, release it. The lock of the tape is held by who
// calls, since two threads that replay the same values would do so twice.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// A tensor on the storage of `value`, replayed if need be. Not to be called paused: hooks outside may run code of the
// user. Throws where its bytes changed, were freed or are lost (Rules 7 and 8 of NOTE [ Replay ]).
//
// `window`: what is needed of its bytes, null: all. `clock`: when the saved tensor that asks for them was saved, 0: not
// known. `is_fresh`, where not null: gets whether nobody else has the tensor.
py::object bytes_of(TapeObject* tape, ValueObject* value, PyObject* window, long long clock, bool* is_fresh);

// Whether one more value may stay beside what is cached: it may pass the window, the next one may not.
bool has_room(const TapeObject* tape);

// The backward under way, -1: none.
long long current_task();

void add_execute_functions(py::module_& module);

}  // namespace actckpt::replay
