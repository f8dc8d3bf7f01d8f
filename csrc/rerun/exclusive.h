// Containers that only the arguments of a call refer to; a rerun may get a rebuilt one.
#pragma once

#include <pybind11/pybind11.h>

namespace actckpt {

void add_exclusive_functions(pybind11::module_& module);

}  // namespace actckpt
