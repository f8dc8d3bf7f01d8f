#include "record/unrecorded.h"

#include "core/grad_mode.h"
#include "core/python.h"
#include "core/reads.h"

namespace actckpt::replay {
namespace {

py::object as_object(PyFrameObject* frame) {
  return py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(frame));
}

// The name of the module whose code a frame runs; borrowed, null if it has none.
PyObject* module_of(const py::object& frame) {
#if PY_VERSION_HEX >= 0x030b0000
  const auto globals =
      py::reinterpret_steal<py::object>(PyFrame_GetGlobals(reinterpret_cast<PyFrameObject*>(frame.ptr())));
#else
  const py::object globals = attribute(frame.ptr(), names().globals);
#endif
  PyObject* name = PyDict_GetItem(globals.ptr(), names().dunder_name);
  return name != nullptr && PyUnicode_Check(name) != 0 ? name : nullptr;
}

bool begins_with(PyObject* name, PyObject* prefix) {
  return PyUnicode_Tailmatch(name, prefix, 0, PY_SSIZE_T_MAX, -1) == 1;
}

// Whether a frame may lie between an operator and its caller: torch's own frames, and those of dispatch modes.
bool passes_on(const py::object& frame, PyObject* module) {
  if (begins_with(module, names().torch_prefix)) return true;
  const auto code = py::reinterpret_steal<py::object>(
      reinterpret_cast<PyObject*>(PyFrame_GetCode(reinterpret_cast<PyFrameObject*>(frame.ptr()))));
  return PyUnicode_Compare(attribute(code.ptr(), names().code_name).ptr(), names().dispatch_name) == 0;
}

// Whether autograd may be saving for compiled code, which is an autograd.Function. The innermost Python frame is then
// `Function.apply` or, if that is no Python function, the compiler's frame that calls it.
bool may_save_for_compiled_code() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) return false;
  const auto code = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  if (code.ptr() == names().apply_code) return true;
  PyObject* name = module_of(py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame)));
  return name != nullptr && begins_with(name, names().compiler_prefix);
}

}  // namespace

bool is_in_compiled_code() {
  // The compiler's runtime turns grad mode off, so most operators need no frame inspection.
  if (is_grad_enabled()) return false;
  py::object frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    PyObject* name = module_of(frame);
    if (name == nullptr) return false;
    if (begins_with(name, names().compiled_prefix)) return true;
    if (!passes_on(frame, name)) return false;
    frame = as_object(PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.ptr())));
  }
  return false;
}

void record_maker_version(TapeObject* tape, ValueObject* value, PyObject* root) {
  if (value->is_parameter != 0 || !reads().requires_grad.is_true(root)) return;
  const py::object node = reads().grad_fn(root);
  if (node.is_none() || !is_instance(node.ptr(), names().function_type)) return;
  PyObject* made[] = {reinterpret_cast<PyObject*>(tape), as_object(value), node.ptr()};
  if (!py::reinterpret_steal<py::object>(PyObject_Vectorcall(names().made_by_function, made, 3, nullptr))) {
    throw py::error_already_set();
  }
}

void look_at_saver(TapeObject* tape, ValueObject* value, PyObject* tensor) {
  if (value->is_input == 0 || value->is_parameter != 0 || reads().requires_grad.is_true(tensor)) return;
  if (!may_save_for_compiled_code()) return;
  PyObject* saved[] = {reinterpret_cast<PyObject*>(tape), as_object(value), tensor};
  if (!py::reinterpret_steal<py::object>(PyObject_Vectorcall(names().saved_by_function, saved, 3, nullptr))) {
    throw py::error_already_set();
  }
}

}  // namespace actckpt::replay
