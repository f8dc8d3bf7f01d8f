// Executes recorded steps again, from available values to the requested value.
//
// Thread rule: GIL held; operators, and loading of stored bytes, release it. The caller holds the lock of the tape,
// since two threads that replay the same values would do the work twice.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// A tensor on the storage of `value`, replayed if needed. Must not be called while paused: outer hooks may run user
// code. Throws if its bytes changed, were freed or are lost (NOTE [ Replay ], Rule 6).
//
// `window`: the bytes that are needed, null: all. `clock`: when the saved tensor that needs them was saved, 0: unknown.
// `is_fresh`, if not null: set to whether nobody else has the tensor.
py::object bytes_of(TapeObject* tape, ValueObject* value, PyObject* window, long long clock, bool* is_fresh);

// Whether one more value may be cached; it may exceed the window, the next one may not.
bool has_room(const TapeObject* tape);

// The current backward, -1: none.
long long current_task();

void add_execute_functions(py::module_& module);

}  // namespace actckpt::replay
