// Work on tensors while every recorder of the thread is paused (NOTE [ Replay ], Rule 7).
#pragma once

#include "core/python.h"

namespace actckpt::replay {

// During its lifetime no recorder of this thread records, grad mode and forward-mode AD are off, and dispatch modes
// that may change results are off the stack.
class Pause {
 public:
  Pause();
  Pause(const Pause&) = delete;
  Pause& operator=(const Pause&) = delete;
  ~Pause() noexcept;

 private:
  bool grad_;         // grad mode before
  bool tangents_;     // forward-mode AD before
  py::object modes_;  // restores the removed modes, null: there were none
};

// Whether recorders of this thread are paused.
bool is_paused() noexcept;

void add_paused(py::module_& module);

}  // namespace actckpt::replay
