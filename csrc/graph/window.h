// Windows: tensors as geometry on the bytes of a value, and the way back to tensors.
#pragma once

#include "graph/geometry.h"
#include "graph/objects.h"

namespace actckpt::replay {

// The geometry of `tensor`, whose bytes are those of `value`.
py::object window_of(PyObject* tensor, PyObject* value, Geometry* geometry);

// The same geometry on the bytes of another value.
py::object window_on(const WindowObject* window, PyObject* value);

// The tensor that a window describes, on the storage of `base`: a fresh one, or `base` itself where it may be that and
// is like the window. While paused only.
py::object on(PyObject* base, const WindowObject* window, bool may_be_base = false);

inline const std::int64_t* sizes_of(const WindowObject* window) {
  return window->dims != nullptr ? window->dims : window->few;
}
inline const std::int64_t* strides_of(const WindowObject* window) { return sizes_of(window) + window->num_dims; }

void add_window_functions(py::module_& module);

}  // namespace actckpt::replay
