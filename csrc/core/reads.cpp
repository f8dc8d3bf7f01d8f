#include "core/reads.h"

namespace actckpt {

void Read::connect(PyObject* type, PyObject* other) {
  get_ = nullptr;
  method_ = nullptr;
  type_ = other_ = nullptr;
  if (PyObject_HasAttr(type, name_) == 0) return;  // this torch has none: reading it raises, connecting does not
  const py::object found = attribute(type, name_);
  if (kind_ == Kind::kAttribute && Py_TYPE(found.ptr()) == &PyGetSetDescr_Type) {
    const PyGetSetDef* definition = reinterpret_cast<PyGetSetDescrObject*>(found.ptr())->d_getset;
    get_ = definition->get;
    closure_ = definition->closure;
  } else if (kind_ == Kind::kMethod && Py_TYPE(found.ptr()) == &PyMethodDescr_Type) {
    const PyMethodDef* definition = reinterpret_cast<PyMethodDescrObject*>(found.ptr())->d_method;
    if (definition->ml_flags == METH_NOARGS) method_ = definition->ml_meth;
  }
  type_ = type;
  other_ = other != nullptr && attribute(other, name_).ptr() == found.ptr() ? other : nullptr;
}

PyObject* Read::get(PyObject* object) const noexcept {
  auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  if (type == type_ || type == other_) {
    if (get_ != nullptr) return get_(object, closure_);
    if (method_ != nullptr) return method_(object, nullptr);
  }
  return kind_ == Kind::kAttribute ? PyObject_GetAttr(object, name_) : PyObject_CallMethodNoArgs(object, name_);
}

py::object Read::operator()(PyObject* object) const { return owned(get(object)); }

long long Read::number(PyObject* object) const {
  const py::object found = (*this)(object);
  const long long number = PyLong_AsLongLong(found.ptr());
  if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return number;
}

Reads& reads() {
  static auto* found = new Reads();  // never destroyed: its references die with the interpreter
  return *found;
}

py::object shape_of(PyObject* tensor) {
  PyObject* shape = reads().shape.get(tensor);
  if (shape == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) throw py::error_already_set();
    py::error_already_set error;  // takes the error over: the code below calls torch again
    if (!reads().is_nested.is_true(tensor)) throw error;
    return py::make_tuple(reads().dim(tensor), reads().numel(tensor));
  }
  return py::reinterpret_steal<py::object>(shape);
}

py::object storage_of(PyObject* tensor) {
  PyObject* storage = reads().untyped_storage.get(tensor);
  if (storage == nullptr) {
    if (PyErr_ExceptionMatches(PyExc_RuntimeError) == 0) throw py::error_already_set();  // NotImplementedError is one
    PyErr_Clear();
  }
  return py::reinterpret_steal<py::object>(storage);
}

py::object memory_of(PyObject* tensor) {
  return reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == names().tensor_type ? storage_of(tensor) : py::object();
}

py::object strided_storage_of(PyObject* tensor) {
  return reads().is_nested.is_true(tensor) ? py::object() : storage_of(tensor);
}

py::object root_of(PyObject* tensor) {
  py::object base = reads().base(tensor);
  return base.is_none() ? py::reinterpret_borrow<py::object>(tensor) : base;
}

void add_read_functions(py::module_& module) {
  module.def(
      "storage_of",
      [](const py::object& tensor) {
        const py::object found = is_plain_tensor(tensor.ptr()) ? storage_of(tensor.ptr()) : py::object();
        return found ? found : py::none();
      },
      "The storage of a plain tensor or parameter, None for all else and where it has none that can be read.");
  module.def(
      "memory_of",
      [](const py::object& tensor) {
        const py::object found = memory_of(tensor.ptr());
        return found ? found : py::none();
      },
      "The storage that a tensor must keep while reruns need it, None for all but plain tensors.");
  module.def(
      "strided_storage_of",
      [](const py::object& tensor) {
        const py::object found = strided_storage_of(tensor.ptr());
        return found ? found : py::none();
      },
      "The storage of a tensor, None where it has none that can be read by strides.");
}

void connect_reads(PyObject* tensor_type, PyObject* parameter_type, PyObject* storage_type) {
  Reads& r = reads();
  for (Read* read : {&r.shape,   &r.dtype,          &r.device,          &r.version,      &r.requires_grad,
                     &r.is_leaf, &r.is_cpu,         &r.is_nested,       &r.is_meta,      &r.is_quantized,
                     &r.layout,  &r.base,           &r.implementation,  &r.grad_fn,      &r.dim,
                     &r.numel,   &r.detach,         &r.is_inference,    &r.is_conj,      &r.is_neg,
                     &r.stride,  &r.storage_offset, &r.untyped_storage, &r.element_size, &r.tensor_nbytes}) {
    read->connect(tensor_type, parameter_type);
  }
  r.nbytes.connect(storage_type, nullptr);
  r.data_ptr.connect(storage_type, nullptr);
}

}  // namespace actckpt
