// Garbage collection for types that hold Python objects, from one list of references: `for_each_reference(object,
// visit)` calls `visit` with each field, a PyObject*&, that `object` owns.
//
// Do not report a reference that others own too: the collector would take live objects for garbage. So fields of a
// shared C++ object are left out, which can only keep something alive.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace actckpt::collected {

namespace py = pybind11;

template <typename Object>
int visit_all(Object& object, visitproc visit, void* argument) {
  int result = 0;
  for_each_reference(object, [&](PyObject*& field) {
    if (result == 0 && field != nullptr) result = visit(field, argument);
  });
  return result;
}

// Frees nothing before all fields are null: freeing can run Python code.
template <typename Object>
void release_all(Object& object) {
  std::vector<PyObject*> released;
  for_each_reference(object, [&](PyObject*& field) {
    if (field != nullptr) released.push_back(std::exchange(field, nullptr));
  });
  for (PyObject* reference : released) Py_DECREF(reference);
}

// `tp_traverse` and `tp_clear` of a type whose objects have this struct.
template <typename Object>
int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  return visit_all(*reinterpret_cast<Object*>(self), visit, arg);
}

template <typename Object>
int clear(PyObject* self) {
  release_all(*reinterpret_cast<Object*>(self));
  return 0;
}

// The C++ object of a pybind11 instance; null during construction, and if C++ owns it too.
template <typename Object, typename Holder>
Object* object_of(PyObject* self) {
  auto found = reinterpret_cast<py::detail::instance*>(self)->get_value_and_holder();
  if (!found.holder_constructed()) return nullptr;
  if constexpr (std::is_same_v<Holder, std::shared_ptr<Object>>) {
    if (found.template holder<Holder>().use_count() > 1) return nullptr;
  }
  return found.template value_ptr<Object>();
}

// For py::class_<Object, Holder>. `release` empties the object, which must stay callable.
template <typename Object, typename Holder = std::unique_ptr<Object>>
py::custom_type_setup by_collector() {
  return py::custom_type_setup([](PyHeapTypeObject* heap_type) {
    PyTypeObject& type = heap_type->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
      Py_VISIT(Py_TYPE(self));
      Object* object = object_of<Object, Holder>(self);
      return object == nullptr ? 0 : visit_all(*object, visit, arg);
    };
    type.tp_clear = [](PyObject* self) -> int {
      if (Object* object = object_of<Object, Holder>(self)) object->release();
      return 0;
    };
  });
}

}  // namespace actckpt::collected
