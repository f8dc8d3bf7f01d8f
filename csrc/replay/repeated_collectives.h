// Replay of collectives that a policy names: NOTE [ Repeated collectives ] in actckpt/_replay/collectives.py.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Runs the collectives that `value` depends on and that this backward has not run yet, in forward order. Their results
// stay until the backward ends. The caller holds the lock of the tape.
void repeat_collectives(TapeObject* tape, ValueObject* value);

// Throws if a step that is about to run is a collective that `repeat_collectives` did not start.
void check_is_in_turn(const TapeObject* tape, const StepObject* step);

}  // namespace actckpt::replay
