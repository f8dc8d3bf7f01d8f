// Recording: what happens at every operator of a region's forward.
#pragma once

#include <cstdint>

#include "replay/objects.h"

namespace actckpt::replay {

bool is_tensor_type(PyObject* type);

// A hash of both.
std::uint64_t mixed(std::uint64_t hash, std::uint64_t word);

void append(PyObject* list, PyObject* item);

void add_record_functions(py::module_& module);

}  // namespace actckpt::replay
