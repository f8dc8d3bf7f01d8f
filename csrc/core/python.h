// Python calls that turn a failure into a C++ exception.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

#include "core/names.h"

namespace actckpt {

namespace py = pybind11;

// Takes over a new reference; throws the pending error if it is null.
py::object owned(PyObject* result);
// The same for types that begin with a PyObject.
template <typename Object>
py::object owned(Object* result) {
  return owned(reinterpret_cast<PyObject*>(result));
}

py::object attribute(PyObject* object, PyObject* name);
py::object call(PyObject* function);
// The same; torch functions without arguments are called as the interpreter does.
inline py::object call_without_arguments(PyObject* function) {
  const bool is_plain = PyCFunction_CheckExact(function) && PyCFunction_GET_FLAGS(function) == METH_NOARGS;
  return is_plain ? owned(PyCFunction_GET_FUNCTION(function)(PyCFunction_GET_SELF(function), nullptr)) : call(function);
}
py::object call(PyObject* function, PyObject* argument);
py::object call_method(PyObject* object, PyObject* name);
py::object call_method(PyObject* object, PyObject* name, PyObject* argument);

// Makes `exception` the pending error and throws it.
[[noreturn]] void raise(const py::object& exception);

// Calls a function for its effect while another error may be pending; that error stays pending.
void call_quietly(PyObject* function, PyObject* argument = nullptr);

bool is_true(PyObject* object, PyObject* name);
// Whether its real type is this type or a subclass: runs no Python code, and does not follow proxies.
inline bool is_of_type(PyObject* object, PyObject* type) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type)) != 0;
}
// Whether it is exactly a tensor or a parameter. A subclass may stand for inner tensors that change, as DTensor does.
inline bool is_plain_tensor_type(PyObject* type) {
  return type == names().tensor_type || type == names().parameter_type;
}
inline bool is_plain_tensor(PyObject* object) {
  return is_plain_tensor_type(reinterpret_cast<PyObject*>(Py_TYPE(object)));
}
// `isinstance`: types may run Python code, in which a signal handler may raise.
bool is_instance(PyObject* object, PyObject* type);
// The version of a tensor; 0 for inference tensors, which have none, so that nothing counts their changes.
long long version_of(PyObject* tensor);

// The same; returns false and sets nothing for inference tensors.
bool read_version(PyObject* tensor, long long* version);

// The boundary to Python: runs `body` and turns a C++ exception into a pending Python error.
template <typename Body>
PyObject* guarded(Body body) noexcept {
  try {
    return body();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
inline PyCFunction fast(FastFunction function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// Throws the pending Python error.
[[noreturn]] inline void throw_pending() { throw py::error_already_set(); }

// object.method(*arguments), without a tuple.
template <typename... Arguments>
py::object call_method_with(PyObject* object, PyObject* method, Arguments... arguments) {
  PyObject* stack[] = {object, arguments...};
  PyObject* result =
      PyObject_VectorcallMethod(method, stack, (1 + sizeof...(arguments)) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (result == nullptr) throw_pending();
  return py::reinterpret_steal<py::object>(result);
}

template <typename... Arguments>
py::object call_with(PyObject* function, Arguments... arguments) {
  PyObject* stack[] = {arguments...};
  PyObject* result = PyObject_Vectorcall(function, stack, sizeof...(arguments), nullptr);
  if (result == nullptr) throw_pending();
  return py::reinterpret_steal<py::object>(result);
}

inline py::object number(long long value) {
  PyObject* result = PyLong_FromLongLong(value);
  if (result == nullptr) throw_pending();
  return py::reinterpret_steal<py::object>(result);
}

}  // namespace actckpt
