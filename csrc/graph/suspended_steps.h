// Steps of values that stay cached in a backward that frees its graph.
//
// The inputs of such a value need not outlive its last need, so the value gives up its step. Without the step its bytes
// would stay held if the backward fails or covers only part of the graph. A suspended step refers weakly to its inputs.
// It is restored if all of them are alive, and then the cached bytes can be released.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Takes the step of `value` and suspends it.
void park_step(ValueObject* value);

// Restores the suspended step of `value`; false if there is none, or an input is dead.
bool restore_step(ValueObject* value);

}  // namespace actckpt::replay
