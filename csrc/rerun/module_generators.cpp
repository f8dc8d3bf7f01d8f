#include "rerun/module_generators.h"

#include <algorithm>

#include "core/python.h"

namespace actckpt {
namespace {

// Maximum number of elements examined in a list, tuple or dict attribute.
constexpr Py_ssize_t kMostLookedAt = 64;

bool is_generator(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  if (reinterpret_cast<PyObject*>(type) == names().generator_type) return true;
  // Types not made by a class statement are no subclasses of torch's; checking that takes time.
  return PyType_HasFeature(type, Py_TPFLAGS_HEAPTYPE) != 0 && is_of_type(value, names().generator_type);
}

// Whether a key is one of the attributes that every module has, which are no generators.
bool is_of_every_module(PyObject* key) noexcept {
  return key == names().parameters || key == names().modules || key == names().buffers ||
         key == names().is_full_backward_hook;
}

// Whether a module is in training; null if it has no mode.
PyObject* mode_of(const py::object& attributes) {
  PyObject* found = PyDict_GetItemWithError(attributes.ptr(), names().training);
  if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return found;
}

void add_place(py::object* displaced, const py::tuple& place) {
  if (!*displaced) *displaced = py::list();
  if (PyList_Append(displaced->ptr(), place.ptr()) < 0) throw py::error_already_set();
}

}  // namespace

void ModuleGenerators::note(const py::object& attributes) {
  noted_.push_back({attributes, py::reinterpret_borrow<py::object>(mode_of(attributes)),
                    PyDict_GET_SIZE(attributes.ptr()), places_.size()});
  PyObject *key, *value;
  Py_ssize_t position = 0;
  while (PyDict_Next(attributes.ptr(), &position, &key, &value) != 0) {
    if (is_of_every_module(key)) continue;
    const bool is_one = is_generator(value);
    if (is_one) add(value);
    if (is_one || value == Py_None) {
      places_.push_back(
          {attributes, py::reinterpret_borrow<py::object>(key), py::reinterpret_borrow<py::object>(value)});
    } else {
      add_those_in(value);
    }
  }
}

void ModuleGenerators::add(PyObject* generator) {
  if (!all_) all_ = py::list();
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(all_.ptr()); ++i) {
    if (PyList_GET_ITEM(all_.ptr(), i) == generator) return;
  }
  if (PyList_Append(all_.ptr(), generator) < 0) throw py::error_already_set();
}

void ModuleGenerators::add_those_in(PyObject* container) {
  if (PyList_CheckExact(container) || PyTuple_CheckExact(container)) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(container);
    for (Py_ssize_t i = 0; i < std::min(size, kMostLookedAt); ++i) {
      PyObject* value = PySequence_Fast_GET_ITEM(container, i);
      if (is_generator(value)) add(value);
    }
  } else if (PyDict_CheckExact(container)) {
    PyObject *key, *value;
    Py_ssize_t position = 0;
    for (Py_ssize_t i = 0; i < kMostLookedAt && PyDict_Next(container, &position, &key, &value) != 0; ++i) {
      if (is_generator(value)) add(value);
    }
  }
}

std::size_t ModuleGenerators::end_of_places(const Noted& known) const {
  return &known == &noted_.back() ? places_.size() : (&known + 1)->first_place;
}

const ModuleGenerators::Place* ModuleGenerators::find(const Noted& known, PyObject* key) const {
  for (std::size_t i = known.first_place; i < end_of_places(known); ++i) {
    const int is_same = PyObject_RichCompareBool(places_[i].key.ptr(), key, Py_EQ);
    if (is_same < 0) throw py::error_already_set();
    if (is_same != 0) return &places_[i];
  }
  return nullptr;
}

void ModuleGenerators::add_mode(const Noted& known, py::object* displaced) const {
  if (!known.mode) return;
  PyObject* found = mode_of(known.attributes);
  if (found == nullptr || found == known.mode.ptr()) return;
  const auto key = py::reinterpret_borrow<py::object>(names().training);
  add_place(displaced, py::make_tuple(known.attributes, key, known.mode));
}

py::object ModuleGenerators::displaced() const {
  py::object found;
  for (const Noted& known : noted_) add_displaced(known, &found);
  return found;
}

void ModuleGenerators::add_displaced(const Noted& known, py::object* displaced) const {
  const py::object& attributes = known.attributes;
  add_mode(known, displaced);
  PyObject *key, *value;
  Py_ssize_t position = 0;
  for (Py_ssize_t number = 0; PyDict_Next(attributes.ptr(), &position, &key, &value) != 0; ++number) {
    if (is_of_every_module(key) || !is_generator(value)) continue;
    const Place* place = find(known, key);
    if (place == nullptr && number >= known.size) {  // added after the module was recorded: new ones are appended
      add_place(displaced, py::make_tuple(attributes, py::handle(key)));
    } else if (place != nullptr && place->value.ptr() != value) {
      add_place(displaced, py::make_tuple(attributes, place->key, place->value));
    }
  }
  for (std::size_t i = known.first_place; i < end_of_places(known); ++i) {
    const Place& place = places_[i];
    if (place.value.is_none()) continue;
    PyObject* found = PyDict_GetItemWithError(attributes.ptr(), place.key.ptr());
    if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    const bool is_gone = found == nullptr || found == Py_None;
    if (is_gone) add_place(displaced, py::make_tuple(attributes, place.key, place.value));
  }
}

}  // namespace actckpt
