// torch.Generators in attributes of modules, and whether modules are in training.
//
// What a forward finds in such an attribute a rerun must find as well: a generator that a module makes in its first
// forward has moved on since, and that one would draw other numbers. So would a model that was switched to evaluation
// between forward and backward.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <vector>

namespace actckpt {

namespace py = pybind11;

class ModuleGenerators {
 public:
  // Notes those among the attributes of one module, there also in lists, tuples and dicts.
  void note(const py::object& attributes);

  // Each once; null where there are none.
  const py::object& all() const noexcept { return all_; }

  // Adds to `displaced` what is not where it was among the attributes of a module that was noted, if it is or was a
  // generator, or its mode: (attributes, key, what was there), without the last where there was nothing. Modules that
  // were not noted, and what took the place of anything else, are let alone. The list is null until there is something.
  void add_displaced(const py::object& attributes, py::object* displaced) const;

  template <typename Visit>
  friend void for_each_reference(ModuleGenerators& generators, const Visit& visit) {
    visit(generators.all_.ptr());
    for (Place& place : generators.places_) {
      for (py::object* field : {&place.attributes, &place.key, &place.value}) visit(field->ptr());
    }
    for (Noted& noted : generators.noted_) {
      for (py::object* field : {&noted.attributes, &noted.mode}) visit(field->ptr());
    }
  }

 private:
  // An attribute that is a generator, or None, in whose place one may be put.
  struct Place {
    py::object attributes, key, value;
  };
  // The attributes of a module that was noted, its mode (null: it has none), and how many attributes these were.
  struct Noted {
    py::object attributes, mode;
    Py_ssize_t size;
  };

  void add(PyObject* generator);
  void add_those_in(PyObject* container);
  void add_mode(const py::object& attributes, py::object* displaced) const;
  const Noted* noted(const py::object& attributes) const;  // null: it was not
  bool is_new(const py::object& attributes, Py_ssize_t number) const;
  const Place* find(const py::object& attributes, PyObject* key) const;

  py::object all_;
  std::vector<Place> places_;
  std::vector<Noted> noted_;
  mutable std::size_t last_found_ = 0;  // of `noted_`
};

}  // namespace actckpt
