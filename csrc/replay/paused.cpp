#include "replay/paused.h"

#include <utility>

#include "core/modes.h"

namespace actckpt::replay {
namespace {

thread_local int depth = 0;

struct PausedObject {
  PyObject_HEAD char grad;  // whether grad mode was on
  char tangents;            // whether tangents were computed
  PyObject* modes;          // what puts back those taken off, null: there were none
};

PyObject* enter(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    auto* paused = reinterpret_cast<PausedObject*>(self);
    paused->grad = call(names().is_grad_enabled).ptr() == Py_True;
    paused->tangents = call(names().tangents_enabled).ptr() == Py_True;
    const bool has_modes = py::len(unknown_modes()) > 0;
    paused->modes = has_modes ? call(names().take_off_modes).release().ptr() : nullptr;
    if (paused->grad != 0) call(names().set_grad_enabled, Py_False);
    if (paused->tangents != 0) call(names().set_tangents_enabled, Py_False);
    depth += 1;
    Py_RETURN_NONE;
  });
}

PyObject* exit(PyObject* self, PyObject*) {
  depth -= 1;
  auto* paused = reinterpret_cast<PausedObject*>(self);
  const auto modes = py::reinterpret_steal<py::object>(std::exchange(paused->modes, nullptr));
  if (modes) call_quietly(names().put_back_modes, modes.ptr());
  if (paused->tangents != 0) call_quietly(names().set_tangents_enabled, Py_True);
  if (paused->grad != 0) call_quietly(names().set_grad_enabled, Py_True);
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"__enter__", enter, METH_NOARGS, nullptr},
                         {"__exit__", exit, METH_VARARGS, nullptr},
                         {nullptr, nullptr, 0, nullptr}};
PyType_Slot slots[] = {{Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)}, {Py_tp_methods, methods}, {0, nullptr}};

}  // namespace

bool is_paused() noexcept { return depth > 0; }

void add_paused(py::module_& module) {
  PyType_Spec spec = {"actckpt._C.Paused", sizeof(PausedObject), 0, Py_TPFLAGS_DEFAULT, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  module.def("is_paused", &is_paused);
  module.add_object("Paused", py::reinterpret_steal<py::object>(type));
}

}  // namespace actckpt::replay
