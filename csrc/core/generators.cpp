#include "core/generators.h"

#include <new>
#include <utility>
#include <vector>

#include "core/collected.h"
#include "core/python.h"

namespace actckpt {
namespace {

struct Captured {
  py::object generator;
  py::object state;  // contiguous CPU byte tensor
};

struct StatesObject {
  PyObject_HEAD std::vector<Captured> captured;
};

template <typename Visit>
void for_each_reference(StatesObject& states, const Visit& visit) {
  for (Captured& entry : states.captured) {
    visit(entry.generator.ptr());
    visit(entry.state.ptr());
  }
}

PyTypeObject* states_type = nullptr;

StatesObject* states_of(PyObject* self) { return reinterpret_cast<StatesObject*>(self); }

PyObject* capture(PyObject*, PyObject* generators) {
  return guarded([&] { return capture_generators(generators).release().ptr(); });
}

PyObject* capture_of_rerun(PyObject*, PyObject* generators) {
  return guarded([&] { return capture_generators_of_rerun(generators).release().ptr(); });
}

PyObject* states_restore(PyObject* self, PyObject*) {
  return guarded([&] {
    restore_generators(py::reinterpret_borrow<py::object>(self));
    return Py_NewRef(Py_None);
  });
}

PyObject* states_now(PyObject* self, PyObject*) {
  return guarded([&] { return generators_now(py::reinterpret_borrow<py::object>(self)).release().ptr(); });
}

int states_clear(PyObject* self) {
  const std::vector<Captured> released = std::exchange(states_of(self)->captured, {});
  return 0;
}

void states_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  using Vector = std::vector<Captured>;
  states_of(self)->captured.~Vector();
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef states_methods[] = {{"restore", states_restore, METH_NOARGS, "Write the states back into the generators."},
                                {"now", states_now, METH_NOARGS, "The states of the same generators as they are now."},
                                {nullptr, nullptr, 0, nullptr}};

PyType_Slot generators_slots[] = {{Py_tp_dealloc, reinterpret_cast<void*>(states_dealloc)},
                                  {Py_tp_traverse, reinterpret_cast<void*>(collected::traverse<StatesObject>)},
                                  {Py_tp_clear, reinterpret_cast<void*>(states_clear)},
                                  {Py_tp_methods, states_methods},
                                  {Py_tp_doc, const_cast<char*>("States of torch.Generators, by value.")},
                                  {0, nullptr}};
PyType_Spec generators_spec = {"actckpt._C.GeneratorStates", sizeof(StatesObject), 0,
                               Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION | Py_TPFLAGS_HAVE_GC,
                               generators_slots};

}  // namespace

py::object capture_generators(PyObject* generators) {
  std::vector<Captured> captured;
  const Py_ssize_t count = PyTuple_GET_SIZE(generators);
  captured.reserve(static_cast<std::size_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* generator = PyTuple_GET_ITEM(generators, i);
    captured.push_back({py::reinterpret_borrow<py::object>(generator), call_method(generator, names().get_state)});
  }
  StatesObject* self = states_of(states_type->tp_alloc(states_type, 0));
  if (self == nullptr) throw py::error_already_set();
  new (&self->captured) std::vector<Captured>(std::move(captured));
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(self));
}

py::object capture_generators_of_rerun(PyObject* generators) {
  py::object states = capture_generators(generators);
  for (const Captured& entry : states_of(states.ptr())->captured) {
    if (entry.generator.ptr() == PyTuple_GET_ITEM(names().cpu_generators, 0)) continue;
    if (!PyObject_TypeCheck(entry.generator.ptr(), reinterpret_cast<PyTypeObject*>(names().generator_type))) continue;
    const py::object device = attribute(entry.generator.ptr(), names().device);
    if (attribute(device.ptr(), names().type).equal(py::handle(names().cuda))) {
      call_method_with(entry.generator.ptr(), names().set_state, entry.state.ptr());
    }
  }
  return states;
}

py::object generators_now(const py::object& states) {
  const auto& captured = states_of(states.ptr())->captured;
  py::tuple generators(captured.size());
  for (std::size_t i = 0; i < captured.size(); ++i) generators[i] = captured[i].generator;
  return capture_generators(generators.ptr());
}

void restore_generators(const py::object& states) {
  for (const Captured& entry : states_of(states.ptr())->captured) {
    call_method(entry.generator.ptr(), names().set_state, entry.state.ptr());
  }
}

void add_generator_types(py::module_& module) {
  states_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&generators_spec));
  if (states_type == nullptr) throw py::error_already_set();
  module.add_object("GeneratorStates", reinterpret_cast<PyObject*>(states_type));
  static PyMethodDef functions[] = {
      {"capture_generators", capture, METH_O, "capture_generators(tuple) -> GeneratorStates"},
      {"capture_generators_of_rerun", capture_of_rerun, METH_O,
       "capture_generators_of_rerun(tuple) -> GeneratorStates of a function that runs again"},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), functions) < 0) throw py::error_already_set();
}

}  // namespace actckpt
