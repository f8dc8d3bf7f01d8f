// Tells whoever asks when a graph task (one backward) ends, also when it fails.
//
// The only mechanism of its kind: values of reruns, replayed values, and bytes read ahead go by it. One TaskEnd per
// graph task is queued as a callback of the autograd engine. The engine calls it when the backward succeeds. It drops
// it with the graph task in any case, also when an operator, a hook or a signal handler raised: then its deallocation
// is the end. Of nested backwards, each has a graph task and an end of its own.
#pragma once

#include <functional>

#include "core/python.h"

namespace actckpt {

enum class TaskResult { kDone, kFailed };

// Called once, in whichever thread ends the graph task, with the GIL held. It must not wait for a lock. What it refers
// to lives until then: refer weakly to what may be freed during the backward.
using AtTaskEnd = std::function<void(TaskResult)>;

// Calls `function` when the graph task `task` ends, which is the one under way in this thread.
void at_task_end(long long task, AtTaskEnd function);

void add_task_end(py::module_& module);

}  // namespace actckpt
