#include "frames/parameters.h"

#include "frames/python.h"

namespace actckpt {
namespace {

// Entries of a module's dict of parameters or modules; null where it has none. Borrowed.
PyObject* entries(const py::object& attributes, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(attributes.ptr(), name);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found != nullptr && PyDict_Check(found) ? found : nullptr;
}

long long sum_of_module(PyObject* module) {
  const py::object attributes = attribute(module, python().dict);
  long long sum = 0;
  PyObject *key, *value;
  Py_ssize_t position = 0;
  if (PyObject* parameters = entries(attributes, python().parameters)) {
    while (PyDict_Next(parameters, &position, &key, &value)) {
      if (value != Py_None) sum += version_of(value);
    }
  }
  position = 0;
  if (PyObject* modules = entries(attributes, python().modules)) {
    while (PyDict_Next(modules, &position, &key, &value)) {
      if (value != Py_None) sum += sum_of_module(value);
    }
  }
  return sum;
}

PyObject* sum_versions(PyObject*, PyObject* modules) {
  return guarded([&]() -> PyObject* {
    long long sum = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(modules); ++i) {
      sum += sum_parameter_versions(PyTuple_GET_ITEM(modules, i));
    }
    return PyLong_FromLongLong(sum);
  });
}

PyMethodDef functions[] = {
    {"sum_parameter_versions", sum_versions, METH_O, "sum_parameter_versions(modules) -> int"},
    {nullptr, nullptr, 0, nullptr}};

}  // namespace

long long sum_parameter_versions(PyObject* module) {
  if (PyMethod_Check(module)) return sum_of_module(PyMethod_GET_SELF(module));
  return sum_of_module(module);
}

void add_parameter_functions(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), functions) < 0) throw py::error_already_set();
}

}  // namespace actckpt
