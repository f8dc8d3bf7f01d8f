// torch.Generators in module attributes, and the modules' training mode.
//
// A rerun must see the generators that the forward saw: one that a module makes in its first forward has advanced
// since, and would draw other numbers. The same holds for the mode: the model may have been switched to evaluation
// between forward and backward.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <vector>

namespace actckpt {

namespace py = pybind11;

class ModuleGenerators {
 public:
  // Records the generators among the attributes of one module, including those in lists, tuples and dicts.
  void note(const py::object& attributes);

  // Without repeats; null if there are none.
  const py::object& all() const noexcept { return all_; }

  // The changed attributes of recorded modules, if they are or were generators, and modes that changed: a list of
  // (attributes, key, old value), without the value if there was none. Null: none.
  py::object displaced() const;

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
  // An attribute that holds a generator, or None, which a generator may replace.
  struct Place {
    py::object attributes, key, value;
  };
  // The attributes of a recorded module, its mode (null: none), and the number of attributes then. Its places start at
  // `first_place` and end where those of the next module start.
  struct Noted {
    py::object attributes, mode;
    Py_ssize_t size;
    std::size_t first_place;
  };

  void add(PyObject* generator);
  void add_those_in(PyObject* container);
  void add_mode(const Noted& known, py::object* displaced) const;
  void add_displaced(const Noted& known, py::object* displaced) const;
  std::size_t end_of_places(const Noted& known) const;
  const Place* find(const Noted& known, PyObject* key) const;

  py::object all_;
  std::vector<Place> places_;
  std::vector<Noted> noted_;
};

}  // namespace actckpt
