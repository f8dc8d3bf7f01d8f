#include "record/paused.h"

#include <memory>

#include "core/grad_mode.h"
#include "core/modes.h"

namespace actckpt::replay {
namespace {

thread_local int depth = 0;

// The same for Python, as a context manager.
struct PausedObject {
  PyObject_HEAD Pause* pause;
};

PyObject* enter(PyObject* self, PyObject*) {
  return guarded([&]() -> PyObject* {
    reinterpret_cast<PausedObject*>(self)->pause = std::make_unique<Pause>().release();
    Py_RETURN_NONE;
  });
}

PyObject* exit(PyObject* self, PyObject*) {
  delete std::exchange(reinterpret_cast<PausedObject*>(self)->pause, nullptr);
  Py_RETURN_NONE;
}

PyMethodDef paused_methods[] = {{"__enter__", enter, METH_NOARGS, nullptr},
                                {"__exit__", exit, METH_VARARGS, nullptr},
                                {nullptr, nullptr, 0, nullptr}};
PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(PyType_GenericNew)}, {Py_tp_methods, paused_methods}, {0, nullptr}};

}  // namespace

Pause::Pause() : grad_(is_grad_enabled()), tangents_(call(names().tangents_enabled).ptr() == Py_True) {
  if (PyTuple_GET_SIZE(unknown_modes().ptr()) > 0) modes_ = call(names().take_off_modes);
  if (grad_) call(names().set_grad_enabled, Py_False);
  if (tangents_) call(names().set_tangents_enabled, Py_False);
  depth += 1;
}

Pause::~Pause() noexcept {
  depth -= 1;
  if (modes_) call_quietly(names().put_back_modes, modes_.ptr());
  if (tangents_) call_quietly(names().set_tangents_enabled, Py_True);
  if (grad_) call_quietly(names().set_grad_enabled, Py_True);
}

bool is_paused() noexcept { return depth > 0; }

void add_paused(py::module_& module) {
  PyType_Spec spec = {"actckpt._C.Paused", sizeof(PausedObject), 0, Py_TPFLAGS_DEFAULT, slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  module.def("is_paused", &is_paused);
  module.add_object("Paused", py::reinterpret_steal<py::object>(type));
}

}  // namespace actckpt::replay
