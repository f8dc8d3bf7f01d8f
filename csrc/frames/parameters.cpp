#include "frames/parameters.h"

#include <cstring>
#include <memory>
#include <utility>

#include "frames/python.h"
#include "frames/reads.h"

namespace actckpt {
namespace {

// Entries of a module's dict of parameters or modules; null where it has none. Borrowed.
PyObject* entries(const py::object& attributes, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(attributes.ptr(), name);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found != nullptr && PyDict_Check(found) ? found : nullptr;
}

// Visits the parameters that require grad of a module and of everything in it. Only exact types:
// sharded parameters (DTensor) stand for others that come and go.
template <typename Visit>
void for_each_parameter(PyObject* module, const Visit& visit) {
  const py::object attributes = attribute(module, python().dict);
  PyObject *key, *value;
  Py_ssize_t position = 0;
  if (PyObject* parameters = entries(attributes, python().parameters)) {
    while (PyDict_Next(parameters, &position, &key, &value)) visit(value);
  }
  position = 0;
  if (PyObject* modules = entries(attributes, python().modules)) {
    while (PyDict_Next(modules, &position, &key, &value)) {
      if (value != Py_None) for_each_parameter(value, visit);
    }
  }
}

bool is_plain(PyObject* parameter) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(parameter));
  return type == python().parameter_type || type == python().tensor_type;
}

bool counts(PyObject* parameter) {
  return is_plain(parameter) && reads().requires_grad.is_true(parameter);
}

bool has_same_bytes(const py::object& copy, PyObject* parameter) {
  PyObject* both[] = {copy.ptr(), parameter};
  PyObject* same = PyObject_Vectorcall(python().has_same_bytes, both, 2, nullptr);
  if (same == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(same).ptr() == Py_True;
}

long long sum_versions(PyObject* module) {
  long long sum = 0;
  for_each_parameter(module, [&](PyObject* parameter) {
    if (counts(parameter)) sum += version_of(parameter);
  });
  return sum;
}

// Owned by a Python Region.
using Handle = std::shared_ptr<Parameters>;

}  // namespace

Parameters::Parameters(PyObject* function) {
  PyObject* module = function;
  if (PyMethod_Check(function)) {
    const py::object name = attribute(PyMethod_GET_FUNCTION(function), python().name);
    if (PyUnicode_CompareWithASCIIString(name.ptr(), "forward") != 0) return;
    module = PyMethod_GET_SELF(function);
  }
  if (!is_instance(module, python().module_type)) return;
  module_ = py::reinterpret_borrow<py::object>(module);
  sum_before_ = sum_versions(module);
}

void Parameters::forward_done() {
  if (!module_) return;
  long long sum = 0;
  for_each_parameter(module_.ptr(), [&](PyObject* parameter) {
    long long version = counts(parameter) ? 0 : -1;
    py::object copy;
    if (version == 0 && !read_version(parameter, &version)) copy = call(python().own_copy, parameter);
    sum += version > 0 ? version : 0;
    noted_.push_back({py::reinterpret_borrow<py::object>(parameter), version, std::move(copy)});
  });
  if (sum != sum_before_) {
    module_ = py::object();
    noted_.clear();
  }
}

void Parameters::check() const {
  if (!module_) return;
  std::size_t index = 0;
  for_each_parameter(module_.ptr(), [&](PyObject* found) {
    const Noted* noted = index < noted_.size() ? &noted_[index] : nullptr;
    ++index;
    if (noted == nullptr || noted->version < 0 || !is_plain(found)) return;
    const long long version = found == noted->parameter.ptr() ? version_of(found) : -1;
    if (version == noted->version && (!noted->copy || has_same_bytes(noted->copy, found))) return;
    PyObject* error = PyObject_CallFunction(python().parameter_error, "OOLL", module_.ptr(), found,
                                            noted->version, version);
    if (error == nullptr) throw py::error_already_set();
    raise(py::reinterpret_steal<py::object>(error));
  });
}

void add_parameter_functions(py::module_& module) {
  py::class_<Parameters, Handle>(module, "Parameters", "Parameters as a forward left them.")
      .def(py::init([](const py::object& function) { return Handle(new Parameters(function.ptr())); }),
           py::arg("function"))
      .def("forward_done", &Parameters::forward_done)
      .def("check", &Parameters::check);
}

}  // namespace actckpt
