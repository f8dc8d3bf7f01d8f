#include "frames/python.h"

#include "frames/reads.h"

namespace actckpt {
namespace {

Python interned() {
  Python names{};
  names.shape = PyUnicode_InternFromString("shape");
  names.dtype = PyUnicode_InternFromString("dtype");
  names.device = PyUnicode_InternFromString("device");
  names.requires_grad = PyUnicode_InternFromString("requires_grad");
  names.detach = PyUnicode_InternFromString("detach");
  names.is_cpu = PyUnicode_InternFromString("is_cpu");
  names.is_inference = PyUnicode_InternFromString("is_inference");
  names.requires_grad_ = PyUnicode_InternFromString("requires_grad_");
  names.dict = PyUnicode_InternFromString("__dict__");
  names.parameters = PyUnicode_InternFromString("_parameters");
  names.modules = PyUnicode_InternFromString("_modules");
  names.get_state = PyUnicode_InternFromString("get_state");
  names.set_state = PyUnicode_InternFromString("set_state");
  names.acquire = PyUnicode_InternFromString("acquire");
  names.release = PyUnicode_InternFromString("release");
  names.name = PyUnicode_InternFromString("__name__");
  names.buffers = PyUnicode_InternFromString("_buffers");
  names.slots = PyUnicode_InternFromString("__slots__");
  names.module = PyUnicode_InternFromString("__module__");
  names.func = PyUnicode_InternFromString("func");
  names.args = PyUnicode_InternFromString("args");
  names.forward_done = PyUnicode_InternFromString("forward_done");
  names.are_as_found = PyUnicode_InternFromString("are_as_found");
  names.watching = PyUnicode_InternFromString("watching");
  names.keywords = PyUnicode_InternFromString("keywords");
  return names;
}

py::object owned(PyObject* result) {
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

}  // namespace

Python& python() {
  static Python names = interned();
  return names;
}

void connect(const py::dict& names) {
  Python& p = python();
  const auto keep = [&](const char* name) -> PyObject* {
    py::object value = names[name];
    return value.is_none() ? nullptr : value.release().ptr();
  };
  p.tensor_type = keep("tensor_type");
  p.parameter_type = keep("parameter_type");
  p.module_type = keep("module_type");
  p.storage_type = keep("storage_type");
  connect_reads(p.tensor_type, p.parameter_type, p.storage_type);
  p.generator_type = keep("generator_type");
  p.partial_type = keep("partial_type");
  p.deque_type = keep("deque_type");
  p.namespace_type = keep("namespace_type");
  p.lock_types = keep("lock_types");
  p.left_alone = keep("left_alone");
  p.global_names = keep("global_names");
  p.lock_type = keep("lock_type");
  p.alias_rules = keep("alias_rules");
  p.state_getters = keep("state_getters");
  p.cpu_generators = keep("cpu_generators");
  p.top_hooks = keep("top_hooks");
  p.push_hooks = keep("push_hooks");
  p.pop_hooks = keep("pop_hooks");
  p.is_grad_enabled = keep("is_grad_enabled");
  p.set_grad_enabled = keep("set_grad_enabled");
  p.is_inference_mode_enabled = keep("is_inference_mode_enabled");
  p.graph_task_id = keep("graph_task_id");
  p.graph_exec_group = keep("graph_exec_group");
  p.queue_callback = keep("queue_callback");
  p.is_capturing = keep("is_capturing");
  p.generators_of = keep("generators_of");
  p.refill = keep("refill");
  p.note_buffers = keep("note_buffers");
  p.swap_timeout_error = keep("swap_timeout_error");
  p.mismatch_error = keep("mismatch_error");
  p.modified_error = keep("modified_error");
  p.changed_error = keep("changed_error");
  p.own_copy = keep("own_copy");
  p.has_same_bytes = keep("has_same_bytes");
  p.input_error = keep("input_error");
  p.failure = keep("failure");
  p.parameter_error = keep("parameter_error");
  p.script_failure = keep("script_failure");
}

py::object attribute(PyObject* object, PyObject* name) {
  return owned(PyObject_GetAttr(object, name));
}

py::object call(PyObject* function) { return owned(PyObject_CallNoArgs(function)); }

py::object call(PyObject* function, PyObject* argument) {
  return owned(PyObject_CallOneArg(function, argument));
}

py::object call_method(PyObject* object, PyObject* name) {
  return owned(PyObject_CallMethodNoArgs(object, name));
}

py::object call_method(PyObject* object, PyObject* name, PyObject* argument) {
  return owned(PyObject_CallMethodOneArg(object, name, argument));
}

void raise(const py::object& exception) {
  PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(exception.ptr())), exception.ptr());
  throw py::error_already_set();
}

void call_quietly(PyObject* function, PyObject* argument) {
  py::error_scope pending;
  PyObject* result =
      argument == nullptr ? PyObject_CallNoArgs(function) : PyObject_CallOneArg(function, argument);
  if (result == nullptr) PyErr_WriteUnraisable(function);
  Py_XDECREF(result);
}

bool is_true(PyObject* object, PyObject* name) { return attribute(object, name).ptr() == Py_True; }

bool is_instance(PyObject* object, PyObject* type) {
  const int result = PyObject_IsInstance(object, type);
  if (result < 0) throw py::error_already_set();
  return result == 1;
}

long long version_of(PyObject* tensor) {
  long long version = 0;
  read_version(tensor, &version);
  return version;
}

bool read_version(PyObject* tensor, long long* version) {
  PyObject* found = reads().version.get(tensor);
  if (found == nullptr) {
    py::error_already_set error;
    if (reads().is_inference.is_true(tensor)) return false;
    throw error;
  }
  const auto object = py::reinterpret_steal<py::object>(found);
  *version = PyLong_AsLongLong(object.ptr());
  if (*version == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return true;
}

}  // namespace actckpt
