#include "record/callee.h"

#include <unordered_map>

namespace actckpt::replay {

Callee::Callee(PyObject* op)
    : callee_(attribute(op, names().callee)),
      direct_(attribute(op, names().direct)),
      tensors_(attribute(op, names().tensor_positions).cast<std::uint64_t>()) {}

bool Callee::is_direct(PyObject* args, PyObject* kwargs) const {
  if (direct_.is_none() || (kwargs != nullptr && PyDict_GET_SIZE(kwargs) > 0)) return false;
  std::uint64_t tensors = tensors_;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i, tensors >>= 1) {
    PyObject* argument = PyTuple_GET_ITEM(args, i);
    if ((tensors & 1) != 0 && !is_plain_tensor(argument) && argument != Py_None) return false;
  }
  return call_without_arguments(names().is_function_mode_enabled).ptr() == Py_False;
}

py::object Callee::operator()(PyObject* args, PyObject* kwargs) const {
  return owned(is_direct(args, kwargs) ? PyObject_Call(direct_.ptr(), args, nullptr)
                                       : PyObject_Call(callee_.ptr(), args, kwargs));
}

const Callee& callee_of(PyObject* op) {
  static auto* found = new std::unordered_map<PyObject*, Callee>();
  const auto at = found->find(op);
  if (at != found->end()) return at->second;
  return found->emplace(Py_NewRef(op), Callee(op)).first->second;
}

}  // namespace actckpt::replay
