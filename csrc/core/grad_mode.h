// Grad mode of the current thread, set for a scope.
#pragma once

#include "core/python.h"

namespace actckpt {

class GradMode {
 public:
  explicit GradMode(bool on) : outside_(call(names().is_grad_enabled)), on_(on) {
    if (is_changed()) call(names().set_grad_enabled, on_ ? Py_True : Py_False);
  }
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;
  ~GradMode() noexcept {
    if (is_changed()) call_quietly(names().set_grad_enabled, outside_.ptr());
  }

 private:
  bool is_changed() const noexcept { return (outside_.ptr() == Py_True) != on_; }

  py::object outside_;
  bool on_;
};

}  // namespace actckpt
