#include "core/all_or_nothing.h"

namespace actckpt {
namespace {

// Called with the pair (method, undo) as self; the first argument is the object.
PyObject* call_both(PyObject* pair, PyObject* const* arguments, Py_ssize_t count) {
  PyObject* result = PyObject_Vectorcall(PyTuple_GET_ITEM(pair, 0), arguments, count, nullptr);
  if (result != nullptr || count == 0) return result;
  py::error_already_set failure;
  PyObject* undo = PyTuple_GET_ITEM(pair, 1);
  PyObject* both[] = {arguments[0], failure.value().ptr()};
  PyObject* done = PyObject_Vectorcall(undo, both, 2, nullptr);
  if (done == nullptr) PyErr_WriteUnraisable(undo);
  Py_XDECREF(done);
  failure.restore();
  return nullptr;
}

PyMethodDef call_both_method = {"all_or_nothing", fast(call_both), METH_FASTCALL, nullptr};

}  // namespace

void add_all_or_nothing(py::module_& module) {
  module.def("all_or_nothing", [](const py::object& method, const py::object& undo) {
    const py::tuple pair = py::make_tuple(method, undo);
    const auto function = py::reinterpret_steal<py::object>(PyCFunction_New(&call_both_method, pair.ptr()));
    // As an attribute of a class it binds like a Python function.
    return py::reinterpret_steal<py::object>(PyInstanceMethod_New(function.ptr()));
  });
}

}  // namespace actckpt
