#include "core/python.h"

#include "core/reads.h"

namespace actckpt {

py::object owned(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

py::object attribute(PyObject* object, PyObject* name) { return owned(PyObject_GetAttr(object, name)); }

py::object call(PyObject* function) { return owned(PyObject_CallNoArgs(function)); }

py::object call(PyObject* function, PyObject* argument) { return owned(PyObject_CallOneArg(function, argument)); }

py::object call_method(PyObject* object, PyObject* name) { return owned(PyObject_CallMethodNoArgs(object, name)); }

py::object call_method(PyObject* object, PyObject* name, PyObject* argument) {
  return owned(PyObject_CallMethodOneArg(object, name, argument));
}

void raise(const py::object& exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw py::error_already_set();
}

void call_quietly(PyObject* function, PyObject* argument) {
  py::error_scope pending;
  PyObject* result = argument == nullptr ? PyObject_CallNoArgs(function) : PyObject_CallOneArg(function, argument);
  if (result == nullptr) PyErr_WriteUnraisable(function);
  Py_XDECREF(result);
}

bool is_true(PyObject* object, PyObject* name) { return attribute(object, name).ptr() == Py_True; }

bool is_instance(PyObject* object, PyObject* type) {
  const int result = PyObject_IsInstance(object, type);
  if (result < 0) throw py::error_already_set();
  return result == 1;
}

long long version_of(PyObject* tensor) {
  long long version = 0;
  read_version(tensor, &version);
  return version;
}

bool read_version(PyObject* tensor, long long* version) {
  PyObject* found = reads().version.get(tensor);
  if (found == nullptr) {
    py::error_already_set error;
    if (reads().is_inference.is_true(tensor)) return false;
    throw error;
  }
  const auto object = py::reinterpret_steal<py::object>(found);
  *version = PyLong_AsLongLong(object.ptr());
  if (*version == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return true;
}

}  // namespace actckpt
