// What the hooks of offloading need of Python and torch, looked up once and held for the life of the
// process. See actckpt/runtime/offload.py for what each callable is.
#pragma once

#include "frames/python.h"

namespace actckpt {

struct HookNames {
  // Interned attribute names.
  PyObject* base;
  PyObject* data;
  PyObject* data_ptr;
  PyObject* element_size;
  PyObject* fetch;
  PyObject* is_conj;
  PyObject* is_cuda;
  PyObject* is_leaf;
  PyObject* is_neg;
  PyObject* is_nested;
  PyObject* is_quantized;
  PyObject* layout;
  PyObject* nbytes;
  PyObject* conj;
  PyObject* prefetch;
  PyObject* put;
  PyObject* saved_again;
  PyObject* set;
  PyObject* storage_offset;
  PyObject* start;
  PyObject* stride;
  PyObject* unload;
  PyObject* unpack;
  PyObject* untyped_storage;
  PyObject* dtype_device;  // keyword names of `empty`
  PyObject* must;          // keyword name of `put`
  PyObject* timing;

  // Set by `connect_hooks`.
  PyObject* backend;         // stores.backend
  PyObject* guard;           // sources.guard
  PyObject* is_owned;        // of a module whose forward runs
  PyObject* stay_rules;      // stays.rules
  PyObject* must_stay;       // stays.must_stay
  PyObject* pack_otherwise;  // subclasses
  PyObject* join;            // partly overlapping spans
  PyObject* learnt_order;
  PyObject* note_order;
  PyObject* max_inflight;
  PyObject* changed_error;
  PyObject* freed_error;
  PyObject* empty;    // torch.empty
  PyObject* strided;  // torch.strided
  PyObject* uint8;    // torch.uint8
};

HookNames& names();

void connect_hooks(const py::dict& given);

// Throws what it cannot be: a Python error that is pending.
[[noreturn]] inline void throw_pending() { throw py::error_already_set(); }

long long integer(PyObject* object, PyObject* attribute_name);
long long integer_of_call(PyObject* object, PyObject* method);

// object.method(*arguments), without a tuple.
template <typename... Arguments>
py::object call_method_with(PyObject* object, PyObject* method, Arguments... arguments) {
  PyObject* stack[] = {object, arguments...};
  PyObject* result = PyObject_VectorcallMethod(
      method, stack, (1 + sizeof...(arguments)) | PY_VECTORCALL_ARGUMENTS_OFFSET, nullptr);
  if (result == nullptr) throw_pending();
  return py::reinterpret_steal<py::object>(result);
}

template <typename... Arguments>
py::object call_with(PyObject* function, Arguments... arguments) {
  PyObject* stack[] = {arguments...};
  PyObject* result = PyObject_Vectorcall(function, stack, sizeof...(arguments), nullptr);
  if (result == nullptr) throw_pending();
  return py::reinterpret_steal<py::object>(result);
}

inline py::object number(long long value) {
  PyObject* result = PyLong_FromLongLong(value);
  if (result == nullptr) throw_pending();
  return py::reinterpret_steal<py::object>(result);
}

}  // namespace actckpt
