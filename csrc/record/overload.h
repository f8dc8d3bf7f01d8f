// Facts about an operator overload (actckpt/_replay/operators.py).
#pragma once

#include "core/numerics.h"
#include "core/python.h"
#include "record/callee.h"

namespace actckpt::replay {

struct Overload {
  py::object func;  // keeps the address valid
  const Callee* callee = nullptr;
  py::object op;
  py::object name;
  bool is_recorded = false;
  bool is_view = false;
  bool is_plain = false;
  bool is_plain_if_kept = false;
  bool makes_one = false;
  bool is_routed = false;
  Numerics which = Numerics::kAll;  // settings that it may depend on
};

// Read once and found by the address of `func`: its hash is a Python function.
const Overload& overload_of(PyObject* func);

}  // namespace actckpt::replay
