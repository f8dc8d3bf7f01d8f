// Containers that nothing but a call's arguments refers to, and which may therefore be built again.
#pragma once

#include <pybind11/pybind11.h>

namespace actckpt {

void add_exclusive_functions(pybind11::module_& module);

}  // namespace actckpt
