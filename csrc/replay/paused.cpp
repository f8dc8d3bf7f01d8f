#include "replay/paused.h"

namespace actckpt::replay {
namespace {

thread_local int depth = 0;

struct PausedObject {
  PyObject_HEAD
  char grad;  // whether grad mode was on
};

PyObject* enter(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    auto* paused = reinterpret_cast<PausedObject*>(self);
    paused->grad = call(python().is_grad_enabled).ptr() == Py_True;
    if (paused->grad != 0) call(python().set_grad_enabled, Py_False);
    depth += 1;
    Py_RETURN_NONE;
  });
}

PyObject* exit(PyObject* self, PyObject*) {
  depth -= 1;
  if (reinterpret_cast<PausedObject*>(self)->grad != 0) call_quietly(python().set_grad_enabled, Py_True);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"__enter__", enter, METH_NOARGS, nullptr},
                         {"__exit__", exit, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)}, {Py_tp_methods, methods}, {0, nullptr}};

}  // namespace

bool is_paused() noexcept { return depth > 0; }

void add_paused(py::module_& module) {
  PyType_Spec spec = {"actckpt._frames.Paused", sizeof(PausedObject), 0, Py_TPFLAGS_DEFAULT, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  module.def("is_paused", &is_paused);
  module.add_object("Paused", py::reinterpret_steal<py::object>(type));
}

}  // namespace actckpt::replay
