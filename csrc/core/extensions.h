// Callbacks of extensions: lists of callables, connected from actckpt/_core/extensions.py.
//
// Thread rule: GIL held.
#pragma once

#include "core/python.h"

namespace actckpt {

// Whether any callable of a list returns True. Other threads may change the list meanwhile.
template <typename... Arguments>
bool any_is_true(PyObject* callables, Arguments... arguments) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(callables); ++i) {
    const auto callable = py::reinterpret_borrow<py::object>(PyList_GET_ITEM(callables, i));
    PyObject* stack[] = {nullptr, arguments...};
    PyObject* result =
        PyObject_Vectorcall(callable.ptr(), stack + 1, sizeof...(arguments) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
    if (result == nullptr) throw_pending();
    Py_DECREF(result);  // True is never freed
    if (result == Py_True) return true;
  }
  return false;
}

}  // namespace actckpt
