// How an operator is called, when it is recorded and when it is replayed.
#pragma once

#include <cstdint>

#include "core/python.h"

namespace actckpt::replay {

// NOTE [ Direct calls ]
//
// Calling an overload from Python costs more than most operators of a small model compute: torch matches the arguments
// against the schema, boxes them, and looks for Python overrides. `torch.mm` and the like reach the same overload
// faster (actckpt/_replay/direct.py lists them). They are used only if nothing can redirect them: positional arguments
// only; plain tensors or None where the schema has tensors (a number would select another overload); no function mode,
// which would see `torch.mm` a second time.
class Callee {
 public:
  // From an `Operator`.
  explicit Callee(PyObject* op);

  // `kwargs` null: none. Throws what the operator raises.
  py::object operator()(PyObject* args, PyObject* kwargs) const;

 private:
  bool is_direct(PyObject* args, PyObject* kwargs) const;

  py::object callee_;
  py::object direct_;          // None: there is none
  std::uint64_t tensors_ = 0;  // positions of the tensor arguments in its schema
};

// Cached per `Operator`; both live as long as the process.
const Callee& callee_of(PyObject* op);

}  // namespace actckpt::replay
