// Attributes of tensors and storages that are read at every saved tensor and every operator.
//
// An attribute lookup takes as long as the getter behind it. So the types' descriptors are looked up once, and called
// as the interpreter calls them, for objects of exactly these types. Any other object, and any attribute that is not a
// plain descriptor, is read by name.
#pragma once

#include "core/python.h"

namespace actckpt {

// One attribute, or one method without arguments.
class Read {
 public:
  enum class Kind { kAttribute, kMethod };

  Read(const char* name, Kind kind) : name_(PyUnicode_InternFromString(name)), kind_(kind) {}
  Read(const Read&) = delete;
  Read& operator=(const Read&) = delete;

  // Looks up the descriptor. `other`: null, or a type that inherits it.
  void connect(PyObject* type, PyObject* other);

  // Throws what the getter raises.
  py::object operator()(PyObject* object) const;
  bool is_true(PyObject* object) const { return (*this)(object).ptr() == Py_True; }
  long long number(PyObject* object) const;

  // A new reference; null with a Python error pending.
  PyObject* get(PyObject* object) const noexcept;

 private:
  PyObject* name_;
  Kind kind_;
  PyObject* type_ = nullptr;
  PyObject* other_ = nullptr;
  getter get_ = nullptr;
  void* closure_ = nullptr;
  PyCFunction method_ = nullptr;
};

struct Reads {
  // Tensors
  Read shape{"shape", Read::Kind::kAttribute};
  Read dtype{"dtype", Read::Kind::kAttribute};
  Read device{"device", Read::Kind::kAttribute};
  Read version{"_version", Read::Kind::kAttribute};
  Read requires_grad{"requires_grad", Read::Kind::kAttribute};
  Read is_leaf{"is_leaf", Read::Kind::kAttribute};
  Read is_cpu{"is_cpu", Read::Kind::kAttribute};
  Read is_nested{"is_nested", Read::Kind::kAttribute};
  Read is_meta{"is_meta", Read::Kind::kAttribute};
  Read is_quantized{"is_quantized", Read::Kind::kAttribute};
  Read layout{"layout", Read::Kind::kAttribute};
  Read base{"_base", Read::Kind::kAttribute};
  Read implementation{"_cdata", Read::Kind::kAttribute};  // `swap_tensors` changes it
  Read grad_fn{"grad_fn", Read::Kind::kAttribute};
  Read dim{"dim", Read::Kind::kMethod};
  Read numel{"numel", Read::Kind::kMethod};
  Read detach{"detach", Read::Kind::kMethod};
  Read is_inference{"is_inference", Read::Kind::kMethod};
  Read is_conj{"is_conj", Read::Kind::kMethod};
  Read is_neg{"is_neg", Read::Kind::kMethod};
  Read stride{"stride", Read::Kind::kMethod};
  Read storage_offset{"storage_offset", Read::Kind::kMethod};
  Read untyped_storage{"untyped_storage", Read::Kind::kMethod};
  Read element_size{"element_size", Read::Kind::kMethod};
  Read tensor_nbytes{"nbytes", Read::Kind::kAttribute};
  // Storages
  Read nbytes{"nbytes", Read::Kind::kMethod};
  Read data_ptr{"data_ptr", Read::Kind::kMethod};
};

Reads& reads();

// The shape; for a nested tensor without one (strided layout), its numbers of dimensions and of elements.
py::object shape_of(PyObject* tensor);
// The storage; null if the tensor has no readable one: sparse tensors, and those of function transforms.
py::object storage_of(PyObject* tensor);
// The storage that a tensor must keep while reruns need it; null for all but plain tensors, since sharding gives
// parameters other memory.
py::object memory_of(PyObject* tensor);
// Like `storage_of`; null also for nested tensors, whose strides do not describe their layout.
py::object strided_storage_of(PyObject* tensor);

// The tensor that shares the version counter of `tensor`: its base if it is a view, else itself.
py::object root_of(PyObject* tensor);

void add_read_functions(py::module_& module);

// Looks up all of them for the types passed to `connect`.
void connect_reads(PyObject* tensor_type, PyObject* parameter_type, PyObject* storage_type);

}  // namespace actckpt
