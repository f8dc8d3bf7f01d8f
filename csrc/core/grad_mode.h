// Grad mode of the current thread, set for a scope.
#pragma once

#include "core/python.h"

namespace actckpt {

// Whether grad mode is on.
bool is_grad_enabled();

class GradMode {
 public:
  explicit GradMode(bool on) : outside_(is_grad_enabled()), on_(on) {
    if (is_changed()) call(names().set_grad_enabled, on_ ? Py_True : Py_False);
  }
  GradMode(const GradMode&) = delete;
  GradMode& operator=(const GradMode&) = delete;
  ~GradMode() noexcept {
    if (is_changed()) call_quietly(names().set_grad_enabled, outside_ ? Py_True : Py_False);
  }

 private:
  bool is_changed() const noexcept { return outside_ != on_; }

  bool outside_;
  bool on_;
};

}  // namespace actckpt
