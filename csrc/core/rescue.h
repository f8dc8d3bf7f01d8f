// Work of a backward that ran out of memory runs once more, after caches have given theirs back.
#pragma once

#include "core/python.h"

namespace actckpt {

// Runs `attempt`, and once more where it ran out of memory and Python allows it (actckpt/_core/rescue.py). `attempt` must
// leave no state behind where it throws. `begun`: what `num_collectives` returned before it, None where it runs none.
template <typename Attempt>
auto with_rescue(const py::object& begun, Attempt attempt) -> decltype(attempt()) {
  try {
    return attempt();
  } catch (py::error_already_set& error) {
    if (call_with(names().may_run_again, error.value().ptr(), begun.ptr()).ptr() != Py_True) throw;
  }  // here the error goes, and with it the frames that hold what the first attempt made
  call(names().make_room);
  return attempt();
}

}  // namespace actckpt
