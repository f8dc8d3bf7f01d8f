// Work on tensors while every recorder of the thread stands aside (Rule 9 of NOTE [ Replay ]).
#pragma once

#include "core/python.h"

namespace actckpt::replay {

// While it lives no recorder of this thread records, no graph is built, no tangents are computed, and dispatch modes
// that may change results are off the stack.
class Pause {
 public:
  Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;
  ~Pause() noexcept;

 private:
  bool grad_;         // whether grad mode was on
  bool tangents_;     // whether tangents were computed
  py::object modes_;  // what puts back those taken off, null: there were none
};

// Whether recorders stand aside in this thread.
bool is_paused() noexcept;

void add_paused(py::module_& module);

}  // namespace actckpt::replay
