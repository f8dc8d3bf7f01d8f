// Drops the values of reruns when the graph task (one backward) they were made for ends.
//
// One TaskEnd per graph task is queued as a callback of the autograd engine. The engine holds it
// until the task is over, with or without an error, so its deallocation is the end of the task. It
// refers to frames weakly: a frame whose graph is freed during backward goes at once.
#pragma once

#include "rerun/frame.h"

namespace actckpt {

// Throws if called outside of a backward.
void drop_at_task_end(FrameObject* frame, PyObject* task_id);

void add_task_end_type();

}  // namespace actckpt
