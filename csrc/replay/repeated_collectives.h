// Collectives that a policy names to be recomputed: NOTE [ Repeated collectives ] in actckpt/_replay/collectives.py.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Runs again the collectives that lead to `value` and that the backward under way has not run again yet, in the order
// of the forward. What they return stays until that backward ends. Called with the lock of the tape held.
void repeat_collectives(TapeObject* tape, ValueObject* value);

// Throws if a step that is about to run again is a collective, and not one that `repeat_collectives` runs.
void check_is_in_turn(const TapeObject* tape, const StepObject* step);

}  // namespace actckpt::replay
