#include "core/grad_mode.h"

namespace actckpt {

bool is_grad_enabled() {
  PyObject* function = names().is_grad_enabled;
  // A function of torch's that takes nothing is called as the interpreter calls it.
  if (PyCFunction_CheckExact(function) && PyCFunction_GET_FLAGS(function) == METH_NOARGS) {
    return owned(PyCFunction_GET_FUNCTION(function)(PyCFunction_GET_SELF(function), nullptr)).ptr() == Py_True;
  }
  return call(function).ptr() == Py_True;
}

}  // namespace actckpt
