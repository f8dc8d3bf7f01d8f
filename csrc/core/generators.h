// Random generator states, captured by value and written back into the same generators.
//
// See NOTE [ Random state ] in actckpt/_core/random_state.py for the rules.
#pragma once

#include "core/python.h"

namespace actckpt {

// Captures the states of a tuple of generators: a GeneratorStates.
py::object capture_generators(PyObject* generators);

// The same at the start of a function that is rerun: Rule 5 of NOTE [ Random state ].
py::object capture_generators_of_rerun(PyObject* generators);

// The current states of the same generators.
py::object generators_now(const py::object& states);

// Writes the states back into their generators.
void restore_generators(const py::object& states);

void add_generator_types(py::module_& module);

}  // namespace actckpt
