#include "record/arguments.h"

#include <utility>

#include "core/python.h"
#include "core/reads.h"
#include "graph/geometry.h"
#include "graph/window.h"
#include "record/known_storages.h"

namespace actckpt::replay {
namespace {

// Records an argument without a version counter.
void note_unversioned(TapeObject* tape, PyObject* why) {
  tape->num_unversioned_args += 1;
  assign(tape->why_unversioned, why);
}

py::object with_windows(TapeObject* tape, PyObject* argument, PyObject* inputs) {
  if (PyObject_TypeCheck(argument, reinterpret_cast<PyTypeObject*>(names().tensor_type))) {
    Geometry geometry(argument);
    py::object value = value_of(tape, argument, geometry);
    if (!value) {
      note_unversioned(tape, names().why_unreadable);
      return py::reinterpret_borrow<py::object>(argument);
    }
    auto* read = as_value(value);
    read->num_reads += 1;
    if (read->version < 0) note_unversioned(tape, names().why_inference);
    if (PyList_Append(inputs, value.ptr()) != 0) throw py::error_already_set();
    return window_of(argument, value.ptr(), &geometry);
  }
  if (PyList_CheckExact(argument) || PyTuple_CheckExact(argument)) {
    py::list items;
    for (const py::handle item : py::reinterpret_borrow<py::sequence>(argument)) {
      items.append(with_windows(tape, item.ptr(), inputs));
    }
    return std::move(items);
  }
  return py::reinterpret_borrow<py::object>(argument);
}

}  // namespace

bool is_tensor_type(PyObject* type) { return is_plain_tensor_type(type) || type == names().fake_tensor_type; }

py::object args_with_windows(TapeObject* tape, PyObject* args, PyObject* inputs) {
  const Py_ssize_t size = PyTuple_GET_SIZE(args);
  py::object list = py::reinterpret_steal<py::object>(PyList_New(size));
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyList_SET_ITEM(list.ptr(), i, with_windows(tape, PyTuple_GET_ITEM(args, i), inputs).release().ptr());
  }
  return list;
}

py::object kwargs_with_windows(TapeObject* tape, PyObject* kwargs, PyObject* inputs) {
  if (kwargs == nullptr || kwargs == Py_None || PyDict_GET_SIZE(kwargs) == 0) return py::none();
  py::dict copied;
  PyObject *name, *argument;
  Py_ssize_t position = 0;
  while (PyDict_Next(kwargs, &position, &name, &argument) != 0) {
    copied[name] = with_windows(tape, argument, inputs);
  }
  return std::move(copied);
}

void add_argument_functions(py::module_& module) {
  module.def("with_windows", [](const py::handle& tape, const py::handle& argument, const py::list& inputs) {
    return with_windows(as_tape(tape), argument.ptr(), inputs.ptr());
  });
}

}  // namespace actckpt::replay
