#include "rerun/exclusive.h"

#include "core/python.h"

namespace actckpt {
namespace {

void visit(PyObject* value, py::set& found);

void visit_items(PyObject* container, py::set& found) {
  if (PyTuple_Check(container)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(container); ++i) {
      visit(PyTuple_GET_ITEM(container, i), found);
    }
  } else if (PyList_Check(container)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(container); ++i) {
      visit(PyList_GET_ITEM(container, i), found);
    }
  } else if (PyDict_Check(container)) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    while (PyDict_Next(container, &position, &key, &value)) visit(value, found);
  }
}

// With one reference, only the container in which it was found refers to it. Objects that are no containers are noted
// too; Python uses the result for dataclasses only.
void visit(PyObject* value, py::set& found) {
  if (Py_REFCNT(value) != 1) return;
  found.add(py::reinterpret_steal<py::object>(PyLong_FromVoidPtr(value)));
  visit_items(value, found);
}

// exclusive_ids(args, kwargs) -> set of id()
PyObject* exclusive_ids(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    py::set found;
    for (Py_ssize_t i = 0; i < count; ++i) visit_items(arguments[i], found);
    return found.release().ptr();
  });
}

PyMethodDef exclusive_functions[] = {{"exclusive_ids", fast(exclusive_ids), METH_FASTCALL,
                                      "exclusive_ids(args, kwargs): id() of what nothing else refers to."},
                                     {nullptr, nullptr, 0, nullptr}};

}  // namespace

void add_exclusive_functions(py::module_& module) {
  if (PyModule_AddFunctions(module.ptr(), exclusive_functions) < 0) throw py::error_already_set();
}

}  // namespace actckpt
