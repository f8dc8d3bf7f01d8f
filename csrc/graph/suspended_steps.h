// Steps of values that stay cached in a backward that frees its graph.
//
// What such a value was replayed from need not outlive its last need, so the value gives its step up, and would be held
// for good where the backward fails or runs through a part of the graph only. Parked, a step refers weakly to what it
// reads: it comes back if all of that is still there, and the cached bytes can go.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Takes the step of `value` from it, and parks it.
void park_step(ValueObject* value);

// Gives the parked step of `value` back; false where there is none, or what it reads is gone.
bool restore_step(ValueObject* value);

}  // namespace actckpt::replay
