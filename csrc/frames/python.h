// What the extension needs of Python and torch: names, types and callables, looked up once and held
// for the life of the process; and calls that turn a failure into a C++ exception.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>

namespace actckpt {

namespace py = pybind11;

struct Python {
  // Interned attribute names.
  PyObject* shape;
  PyObject* dtype;
  PyObject* device;
  PyObject* requires_grad;
  PyObject* detach;
  PyObject* is_cpu;
  PyObject* is_inference;
  PyObject* requires_grad_;
  PyObject* dict;
  PyObject* parameters;
  PyObject* modules;
  PyObject* get_state;
  PyObject* set_state;
  PyObject* acquire;
  PyObject* release;
  PyObject* name;
  PyObject* buffers;
  PyObject* slots;
  PyObject* module;
  PyObject* func;
  PyObject* args;
  PyObject* keywords;
  PyObject* forward_done;
  PyObject* are_as_found;
  PyObject* watching;

  // Set by `connect`; see actckpt/runtime/connect.py for what each is.
  PyObject* tensor_type;
  PyObject* parameter_type;
  PyObject* module_type;
  PyObject* fake_tensor_type;  // null where torch has none
  PyObject* storage_type;
  PyObject* generator_type;
  PyObject* partial_type;
  PyObject* deque_type;
  PyObject* namespace_type;
  PyObject* lock_types;
  PyObject* left_alone;
  PyObject* global_names;
  PyObject* lock_type;
  PyObject* alias_rules;      // list of callables: see actckpt/runtime/stays.py
  PyObject* state_getters;
  PyObject* cpu_generators;
  PyObject* top_hooks;        // null where torch does not tell
  PyObject* push_hooks;
  PyObject* pop_hooks;
  PyObject* is_grad_enabled;
  PyObject* set_grad_enabled;
  PyObject* is_inference_mode_enabled;
  PyObject* num_dispatch_modes;
  PyObject* take_off_modes;  // -> what `put_back_modes` takes
  PyObject* put_back_modes;
  PyObject* tangents_enabled;
  PyObject* set_tangents_enabled;
  PyObject* unknown_modes;  // -> tuple of those that may change results
  PyObject* graph_task_id;
  PyObject* graph_exec_group;  // null where torch has none
  PyObject* queue_callback;    // null where torch has none
  PyObject* is_capturing;      // null where there is no CUDA
  PyObject* generators_of;
  PyObject* refill;
  PyObject* note_buffers;
  PyObject* swap_timeout_error;
  PyObject* mismatch_error;
  PyObject* modified_error;
  PyObject* changed_error;
  PyObject* own_copy;
  PyObject* has_same_bytes;
  PyObject* input_error;
  PyObject* failure;
  PyObject* parameter_error;
  PyObject* script_failure;  // how TorchScript words that a hook has raised
};

Python& python();

// Takes over the names that a dict gives for the fields above.
void connect(const py::dict& names);

py::object attribute(PyObject* object, PyObject* name);
py::object call(PyObject* function);
py::object call(PyObject* function, PyObject* argument);
py::object call_method(PyObject* object, PyObject* name);
py::object call_method(PyObject* object, PyObject* name, PyObject* argument);

// Makes `exception` the pending error and throws it.
[[noreturn]] void raise(const py::object& exception);

// Calls for their effect while another error may be pending, which stays the one that counts.
void call_quietly(PyObject* function, PyObject* argument = nullptr);

bool is_true(PyObject* object, PyObject* name);
// Whether it really is of this type or a subclass: runs no Python code, and a proxy is only a proxy.
inline bool is_of_type(PyObject* object, PyObject* type) {
  return PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject*>(type)) != 0;
}
// Whether it is exactly a tensor or a parameter: subclasses may stand for others that come and go, as DTensor does.
inline bool is_plain_tensor(PyObject* object) {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return type == python().tensor_type || type == python().parameter_type;
}
// Types may ask Python code, in which a signal handler may raise.
bool is_instance(PyObject* object, PyObject* type);
// The version of a tensor, 0 for inference tensors: they have none, and nothing is known of what is done to them.
long long version_of(PyObject* tensor);

// The same; returns false, having read nothing, for inference tensors.
bool read_version(PyObject* tensor, long long* version);

// The border to Python: runs `body` and turns a C++ exception into a pending Python error.
template <typename Body>
PyObject* guarded(Body body) noexcept {
  try {
    return body();
  } catch (py::error_already_set& error) {
    error.restore();
  } catch (py::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

using FastFunction = PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t);
inline PyCFunction fast(FastFunction function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace actckpt
