// The audit of reruns (NOTE [ Audit of reruns ]) is in Python; most calls have none.
#pragma once

#include "core/python.h"
#include "rerun/frame.h"

namespace actckpt {

// Calls a method of the audit of a region with the index of a saved tensor, and `object`.
inline void tell_audit(const FrameObject* frame, PyObject* method, std::size_t index, PyObject* object) {
  if (!frame->recipe.audit) return;
  const py::object audit = frame->recipe.audit, place = number(static_cast<long long>(index));
  call_method_with(audit.ptr(), method, place.ptr(), object);
}

}  // namespace actckpt
