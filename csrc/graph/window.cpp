#include "graph/window.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <new>
#include <vector>

#include "core/python.h"
#include "core/reads.h"

namespace actckpt::replay {
namespace {

void set_dims(WindowObject* window, int num_dims, const std::int64_t* sizes, const std::int64_t* strides) {
  std::int64_t* dims = window->few;
  if (num_dims > kFewDims) {
    dims = window->dims = static_cast<std::int64_t*>(PyMem_Malloc(2 * num_dims * sizeof(std::int64_t)));
    if (dims == nullptr) throw std::bad_alloc();
  }
  window->num_dims = num_dims;
  std::copy_n(sizes, num_dims, dims);
  std::copy_n(strides, num_dims, dims + num_dims);
}

// For a tensor whose dtype and bits equal the window's.
bool has_dims(PyObject* tensor, const Geometry& geometry, const WindowObject* window) {
  const int count = window->num_dims;
  return geometry.num_dims() == count && std::equal(geometry.sizes(), geometry.sizes() + count, sizes_of(window)) &&
         std::equal(geometry.strides(), geometry.strides() + count, strides_of(window)) &&
         reads().storage_offset.number(tensor) == window->offset;
}

// Whether the window can be reached from a tensor by strides alone.
bool has_type_and_bits(PyObject* tensor, const Geometry& geometry, const WindowObject* window) {
  return window->is_conj == 0 && window->is_neg == 0 && geometry.dtype() == window->dtype &&
         !reads().is_neg.is_true(tensor) && !(geometry.is_complex() && reads().is_conj.is_true(tensor));
}

// If the dtype or a bit differs: a new tensor on the storage.
py::object reinterpreted(PyObject* base, const WindowObject* window, const py::object& shape, const py::object& stride,
                         const py::object& offset) {
  static PyObject* const zero = PyLong_FromLong(0);
  const py::object device = reads().device(base);
  PyObject* arguments[] = {zero, window->dtype, device.ptr()};
  py::object tensor = owned(PyObject_Vectorcall(names().empty, arguments, 1, names().keywords_dtype_device));
  const py::object storage = reads().untyped_storage(base);
  call_method_with(tensor.ptr(), names().set, storage.ptr(), offset.ptr(), shape.ptr(), stride.ptr());
  if (window->is_conj != 0) tensor = call_method(tensor.ptr(), names().conj);
  return window->is_neg != 0 ? call_method(tensor.ptr(), names().neg_view) : tensor;
}

// A window without a value, from a `Geometry` of actckpt/_replay/geometry.py.
py::object window_from(const py::tuple& geometry) {
  auto* window = allocated<WindowObject>(window_type);
  auto result = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(window));
  assign(window->dtype, geometry[0].ptr());
  const auto shape = geometry[1].cast<std::vector<std::int64_t>>();
  const auto stride = geometry[2].cast<std::vector<std::int64_t>>();
  set_dims(window, static_cast<int>(shape.size()), shape.data(), stride.data());
  window->offset = geometry[3].cast<long long>();
  window->is_conj = geometry[4].cast<bool>();
  window->is_neg = geometry[5].cast<bool>();
  return result;
}

}  // namespace

py::object window_of(PyObject* tensor, PyObject* value, Geometry* given) {
  const Geometry& geometry = given->of(tensor);
  auto* window = allocated<WindowObject>(window_type);
  auto result = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(window));
  assign(window->value, value);
  assign(window->dtype, geometry.dtype());
  set_dims(window, geometry.num_dims(), geometry.sizes(), geometry.strides());
  window->offset = reads().storage_offset.number(tensor);
  window->is_conj = geometry.is_complex() && reads().is_conj.is_true(tensor);
  window->is_neg = reads().is_neg.is_true(tensor);
  return result;
}

py::object window_on(const WindowObject* window, PyObject* value) {
  auto* copied = allocated<WindowObject>(window_type);
  auto result = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(copied));
  copied->is_conj = window->is_conj;
  copied->is_neg = window->is_neg;
  assign(copied->value, value);
  assign(copied->dtype, window->dtype);
  set_dims(copied, window->num_dims, sizes_of(window), strides_of(window));
  copied->offset = window->offset;
  return result;
}

py::object on(PyObject* base, const WindowObject* window, bool may_be_base) {
  Geometry read(base);
  const Geometry& geometry = read.of(base);
  const bool is_by_strides = has_type_and_bits(base, geometry, window);
  if (is_by_strides && has_dims(base, geometry, window)) {
    return may_be_base ? py::reinterpret_borrow<py::object>(base) : reads().detach(base);
  }
  const py::object shape = tuple_of(sizes_of(window), window->num_dims);
  const py::object stride = tuple_of(strides_of(window), window->num_dims);
  const py::object offset = number(window->offset);
  if (!is_by_strides) return reinterpreted(base, window, shape, stride, offset);
  return call_method_with(base, names().as_strided, shape.ptr(), stride.ptr(), offset.ptr());
}

void add_window_functions(py::module_& module) {
  module.def("window_of", [](const py::handle& tensor, const py::handle& value) {
    Geometry geometry(tensor.ptr());
    return window_of(tensor.ptr(), value.ptr(), &geometry);
  });
  module.def("on", [](const py::handle& base, const py::object& window) {
    const bool is_window =
        reinterpret_cast<PyObject*>(Py_TYPE(window.ptr())) == reinterpret_cast<PyObject*>(window_type);
    const py::object found = is_window ? window : window_from(window.cast<py::tuple>());
    return on(base.ptr(), reinterpret_cast<WindowObject*>(found.ptr()));
  });
}

}  // namespace actckpt::replay
