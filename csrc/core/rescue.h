// Backward work that ran out of memory runs once more: see actckpt/_core/rescue.py.
#pragma once

#include "core/open_reruns.h"
#include "core/python.h"

namespace actckpt {

// Runs `attempt`, and once more if it ran out of memory and Python allows it. `attempt` must leave no state behind if
// it throws. `begun`: result of `num_operations` before a rerun, None for a replay or a reload.
template <typename Attempt>
auto with_rescue(const py::object& begun, Attempt attempt) -> decltype(attempt()) {
  const long long reruns = num_reruns;
  py::object first;
  try {
    return attempt();
  } catch (py::error_already_set& error) {
    if (begun.is_none() && num_reruns != reruns) throw;  // a replay or reload during which a rerun ran
    if (call_with(names().may_run_again, error.value().ptr(), begun.ptr()).ptr() != Py_True) throw;
    first = owned(PyObject_Str(error.value().ptr()));
  }  // frees the error, and with it the frames that hold what the first attempt made
  try {
    call(names().release_caches);
    return attempt();
  } catch (py::error_already_set& error) {
    call_with(names().add_first_error, error.value().ptr(), first.ptr());
    throw;
  }
}

}  // namespace actckpt
