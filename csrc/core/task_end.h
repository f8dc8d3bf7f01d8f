// Calls back when a graph task (one backward) ends, also when it fails.
//
// Rerun values, replayed values and bytes read ahead are released by it; there is no other mechanism. One TaskEnd per
// graph task is queued as a callback of the autograd engine. The engine calls it if the backward succeeds. It drops it
// with the graph task in any case, also if an operator, a hook or a signal handler raised; then its deallocation marks
// the end. Nested backwards each have their own graph task and end.
#pragma once

#include <functional>

#include "core/python.h"

namespace actckpt {

enum class TaskResult { kDone, kFailed };

// Called once, in the thread that ends the graph task, with the GIL held. It must not wait for a lock. What it refers
// to lives until then: refer weakly to what may be freed during the backward.
using AtTaskEnd = std::function<void(TaskResult)>;

// Calls `function` when graph task `task`, the current one of this thread, ends.
void at_task_end(long long task, AtTaskEnd function);

void add_task_end(py::module_& module);

}  // namespace actckpt
