// Replacements for the machine's own facilities under the engine: another extension, built by a compiler with the same
// ABI, passes them in a capsule.

#pragma once

#include <pybind11/pybind11.h>

#include <functional>
#include <memory>

#include "engine/cuda/driver.h"
#include "engine/disk/file_io.h"
#include "engine/protocol/rules.h"

namespace actckpt::python {

using GivenFileIo = std::shared_ptr<FileIo>;

struct GivenDriver {
  const cuda::Driver* table;
  // Runs the device until it is idle; called when the engine waits. Owns what the table needs.
  std::function<void()> advance;
  ProtocolRules rules;  // all on, except in mutation tests
};

inline constexpr const char* kFileIoCapsule = "actckpt.GivenFileIo";
inline constexpr const char* kDriverCapsule = "actckpt.GivenDriver";

// A copy of the capsule's contents. Throws if it is a capsule of another name, or none.
template <typename Given>
Given given(const pybind11::object& capsule, const char* name) {
  auto* const found = static_cast<Given*>(PyCapsule_GetPointer(capsule.ptr(), name));
  if (found == nullptr) throw pybind11::error_already_set();
  return *found;
}

template <typename Given>
pybind11::capsule capsule_of(Given value, const char* name) {
  return pybind11::capsule(new Given(std::move(value)), name, [](PyObject* capsule) {
    delete static_cast<Given*>(PyCapsule_GetPointer(capsule, PyCapsule_GetName(capsule)));
  });
}

}  // namespace actckpt::python
