// Windows: tensors as geometry on the bytes of a value, and tensors made from them.
#pragma once

#include "graph/geometry.h"
#include "graph/objects.h"

namespace actckpt::replay {

// The geometry of `tensor`, whose bytes belong to `value`.
py::object window_of(PyObject* tensor, PyObject* value, Geometry* geometry);

// The same geometry on another value.
py::object window_on(const WindowObject* window, PyObject* value);

// The tensor that a window describes, on the storage of `base`: a new one, or `base` itself if that is allowed and
// equal. Only while paused.
py::object on(PyObject* base, const WindowObject* window, bool may_be_base = false);

inline const std::int64_t* sizes_of(const WindowObject* window) {
  return window->dims != nullptr ? window->dims : window->few;
}
inline const std::int64_t* strides_of(const WindowObject* window) { return sizes_of(window) + window->num_dims; }

void add_window_functions(py::module_& module);

}  // namespace actckpt::replay
