// What the parts of the extension share.
//
// Contract: each bind_* function adds its classes to the module. NOTE [References]: a KeepAlive of
// the engine is an owned PyObject*. It is taken with the GIL held and dropped by `drop_references`,
// with the GIL held and no lock of the engine.
// Thread rule: GIL held throughout.

#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>

#include "engine/keep_alive.h"

namespace actckpt::python {

namespace py = pybind11;

// All of it.
void bind_engine(py::module_& module);

void bind_memory(py::module_& module);
void bind_host(py::module_& module);

// Drops what the engine handed back. Any Python code may run here.
inline void drop_references(const Released& released) {
  for (const KeepAlive keep : released) {
    Py_DECREF(static_cast<PyObject*>(keep));
  }
}

// An owned reference on its way into the engine; dropped unless `commit` was called.
class Reference {
 public:
  explicit Reference(const py::object& object) : object_(object.ptr()) { Py_INCREF(object_); }
  Reference(const Reference&) = delete;
  Reference& operator=(const Reference&) = delete;
  ~Reference() { Py_XDECREF(object_); }

  KeepAlive get() const { return object_; }
  void commit() { object_ = nullptr; }

 private:
  PyObject* object_;
};

inline std::byte* to_pointer(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

}  // namespace actckpt::python
