// What is called to run an operator, when it is recorded and when it is replayed.
#pragma once

#include <cstdint>

#include "core/python.h"

namespace actckpt::replay {

// NOTE [ Direct calls ]
//
// To call an overload takes torch longer than what most operators of a small model compute: it matches the arguments
// against the schema, boxes them, and looks for Python code that wants to see the call. `torch.mm` and the like go to
// the same overload in less time (actckpt/_replay/direct.py has which). They are called only where nothing can lead
// them to another one, or to other code: arguments by position, plain tensors or None where the schema has tensors (a
// number there means another overload to them), and no function mode, which would see `torch.mm` a second time.
class Callee {
 public:
  // Of an `Operator`.
  explicit Callee(PyObject* op);

  // `kwargs` null: none. Throws what the operator raises.
  py::object operator()(PyObject* args, PyObject* kwargs) const;

 private:
  bool is_direct(PyObject* args, PyObject* kwargs) const;

  py::object callee_;
  py::object direct_;          // None: there is none
  std::uint64_t tensors_ = 0;  // positions of the arguments that are tensors in its schema
};

// That of an `Operator`; both live as long as the process.
const Callee& callee_of(PyObject* op);

}  // namespace actckpt::replay
