// What an open region holds of operators that its policy keeps, until it is known whether a saved tensor needs it.
#pragma once

#include "graph/objects.h"

namespace actckpt::replay {

// Releases kept values that neither the program nor a recorded step refers to, as plain autograd does. Looks at all of
// them only when what the region holds has grown by a sixteenth since the last time.
void release_unused(TapeObject* tape);

}  // namespace actckpt::replay
