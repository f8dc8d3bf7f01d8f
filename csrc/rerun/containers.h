// Reads and writes the contents of one container, without calling overridden methods of subclasses.
#pragma once

#include "rerun/object_state.h"

namespace actckpt {

// A copy of its contents: a dict for kinds with keys, else a list.
py::object contents_of(const Container& container);

// Whether its contents are the same objects as `contents`, in the same order.
bool holds(const Container& container, const py::object& contents);

// Sets its contents.
void put(const Container& container, const py::object& contents);

// Sets its contents at these keys only; for kinds with keys.
void put_keys(const Container& container, const py::object& contents, const py::object& keys);

// The set of keys at which two such dicts differ.
py::object different_keys(const py::object& one, const py::object& other);

bool has_keys(const Container& container) noexcept;

// Whether code unknown to the region may set entries too: attributes of an object, globals.
bool is_shared(const Container& container) noexcept;

// The slots (`__slots__`) that a type and its bases have.
std::vector<PyMemberDef*> slots_of(PyTypeObject* type);

}  // namespace actckpt
