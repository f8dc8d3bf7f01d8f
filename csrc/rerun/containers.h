// Reading and writing what one container holds: without calling what a subclass overrides.
#pragma once

#include "rerun/object_state.h"

namespace actckpt {

// A copy of what it holds: a dict for kinds with keys, else a list.
py::object contents_of(const Container& container);

// Whether it holds the very objects of `contents`, in the same order.
bool holds(const Container& container, const py::object& contents);

// Makes it hold `contents`.
void put(const Container& container, const py::object& contents);

// The same, but only what is at these keys, for kinds with keys.
void put_keys(const Container& container, const py::object& contents, const py::object& keys);

// Keys at which two such dicts differ, as a set.
py::object different_keys(const py::object& one, const py::object& other);

bool has_keys(const Container& container) noexcept;

// Whether others may set something beside what the region knows: attributes of an object, globals.
bool is_shared(const Container& container) noexcept;

// The slots (`__slots__`) that a type and its bases have.
std::vector<PyMemberDef*> slots_of(PyTypeObject* type);

}  // namespace actckpt
