// Holds a Python lock (`threading.RLock`) for a scope. Waiting for it releases the GIL.
#pragma once

#include "core/python.h"

namespace actckpt {

class Locked {
 public:
  explicit Locked(PyObject* lock) : lock_(py::reinterpret_borrow<py::object>(lock)) {
    call_method(lock, names().acquire);
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked() noexcept {
    py::error_scope pending;
    PyObject* done = PyObject_CallMethodNoArgs(lock_.ptr(), names().release);
    if (done == nullptr) PyErr_WriteUnraisable(lock_.ptr());
    Py_XDECREF(done);
  }

 private:
  py::object lock_;
};

}  // namespace actckpt
