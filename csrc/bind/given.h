// What may be put under the engine in place of the machine's own: another extension, built by a compiler of the same
// ABI, hands it over in a capsule.

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
  // Lets the device run until it has nothing to do; called where the engine waits. Owns what the table needs.
  std::function<void()> advance;
  ProtocolRules rules;  // all, but in mutation tests
};

inline constexpr const char* kFileIoCapsule = "actckpt.GivenFileIo";
inline constexpr const char* kDriverCapsule = "actckpt.GivenDriver";

// A copy of what the capsule holds. Throws where it is a capsule of another name, or none.
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
