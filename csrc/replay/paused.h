// Whether the recorders of this thread stand aside.
#pragma once

#include "core/python.h"

namespace actckpt::replay {

bool is_paused() noexcept;

// Adds `Paused`, a context in which they do. In C++, so that no signal handler can raise between its two halves.
void add_paused(py::module_& module);

}  // namespace actckpt::replay
