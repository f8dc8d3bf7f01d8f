// The C objects of the graph as Python types: deallocation, member tables and type names.
#pragma once

#include <structmember.h>
#include <cstring>

#include "core/python.h"
#include "graph/objects.h"

namespace actckpt::replay {

// Values refer to steps and steps to values: freeing a long chain recursively would overflow the stack. Beyond some
// depth, objects are queued and freed by the outermost scope.
class FreeScope {
 public:
  FreeScope() noexcept;
  ~FreeScope() noexcept;
  FreeScope(const FreeScope&) = delete;
  FreeScope& operator=(const FreeScope&) = delete;
};

// Releases the object in a field, within a scope.
void release_field(PyObject*& field) noexcept;

template <typename Object, typename... Fields>
void free_object(PyObject* self, Fields Object::*... fields) noexcept {
  py::error_scope pending;
  PyTypeObject* type = Py_TYPE(self);
  {
    FreeScope scope;
    auto* object = reinterpret_cast<Object*>(self);
    (release_field(object->*fields), ...);
    type->tp_free(self);
  }
  Py_DECREF(type);
}

#define OBJECT(type, name, field) {name, T_OBJECT, offsetof(type, field), 0, nullptr}
#define NUMBER(type, name, field) {name, T_LONGLONG, offsetof(type, field), 0, nullptr}
#define FLAG(type, name, field) {name, T_BOOL, offsetof(type, field), 0, nullptr}
#define SEEN(type, name, field) {name, T_OBJECT, offsetof(type, field), READONLY, nullptr}
#define END {nullptr, 0, 0, 0, nullptr}

template <typename Function>
void* slot(Function* function) {
  return reinterpret_cast<void*>(function);
}

template <typename Object>
PyTypeObject* made(py::module_& module, const char* name, PyType_Slot* slots, unsigned long flags) {
  PyType_Spec spec = {name, sizeof(Object), 0, static_cast<unsigned int>(Py_TPFLAGS_DEFAULT | flags), slots};
  PyObject* type = PyType_FromSpec(&spec);
  if (type == nullptr) throw py::error_already_set();
  const char* short_name = std::strrchr(name, '.') + 1;
  module.add_object(short_name, py::reinterpret_borrow<py::object>(type));
  return reinterpret_cast<PyTypeObject*>(type);
}

// Adds the types of the graph, and those of a region.
void add_graph_types(py::module_& module);
void add_region_types(py::module_& module);

}  // namespace actckpt::replay
